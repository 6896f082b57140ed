"""The decode loop: each round drafts, verifies, accepts and commits."""
