"""Latency objectives, and whether requests keep to them."""
