"""The round: draft, verify, accept, commit."""
