"""Devices: memory, streams, graphs, plans, and the executor over them."""
