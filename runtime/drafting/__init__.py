"""Drafters, which propose trees: a draft model, PARD, EAGLE-3, or lookup in the text."""
