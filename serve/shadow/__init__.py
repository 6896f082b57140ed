"""Texts decoded again without speculation, which must be the same."""
