"""Compares texts and drafts with those of a reference window."""
