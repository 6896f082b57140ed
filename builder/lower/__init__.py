"""Lowerings: from the portable graph to what a backend compiles, one module each."""
