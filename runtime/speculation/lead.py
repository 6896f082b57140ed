"""Lead: how far ahead of plain decoding a sequence is, so that the drafts of others do not slow it."""

from __future__ import annotations

LEEWAY = 0.05  # tokens a round by which the drafts of others may slow a sequence
MOST_LOST = 1.0  # tokens that a round may cost it: what takes longer is no draft's fault


def gain(emitted: int, rounds: float) -> float:
    """Return how far ahead of plain decoding a sequence comes in a round with drafts, in tokens, plus the leeway.

    Args:
        emitted: The tokens that it emitted.
        rounds: How many rounds of plain decoding would have taken as long.
    """
    return LEEWAY + max(emitted - rounds, -MOST_LOST)
