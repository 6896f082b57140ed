"""Tokens as a string, in which Python searches fastest."""

from __future__ import annotations

from collections.abc import Iterable

MAX_MATCH = 12  # tokens of a text's end that are searched for
_CHARACTERS = (1 << 20) - 1


def string_of(tokens: Iterable[int]) -> str:
    """Return a string with a character for each token; ids past 2²⁰ become others."""
    return "".join([chr(token & _CHARACTERS) for token in tokens])
