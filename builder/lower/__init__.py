"""Lowerings, one module each: they turn the portable graph into one that a backend runs or compiles."""
