"""Latency objectives, and how much is drafted so that they are kept."""
