"""Checks of a build: its graphs and bundle against Hugging Face, its exactness, rounding and step times."""
