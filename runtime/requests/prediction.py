"""Predicted outputs: a client's guess of an answer, and where the answer stands in it."""

from __future__ import annotations

from collections.abc import Sequence

from .token_string import MAX_MATCH, string_of

CERTAIN = 4  # tokens that must match for a place in a text to be believed


class Prediction:
    """Follows an output through its prediction.

    An edit leaves the prediction and comes back to it: to the longest run of tokens that the output ends with, and
    among equals to the next one after the last place that was certain.

    Attributes:
        matched: Tokens in a row up to the end of the output that the prediction has; 0: the output has left it. A
            client's guess of an output that has not begun is believed.
        foretold: Tokens of the output that were the next ones of the prediction.
    """

    __slots__ = ("_certain", "_end", "_next", "_string", "foretold", "matched", "tokens")

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.matched, self.foretold = MAX_MATCH, 0
        self._string, self._end = string_of(tokens), ""
        self._next = self._certain = 0

    def push(self, token: int) -> None:
        """Take the next token of the output."""
        self._end = (self._end + string_of([token]))[-MAX_MATCH:]
        if self.tokens[self._next : self._next + 1] == [token]:
            self.foretold += 1
            self.matched += 1
            self._next += 1
        else:
            self.matched = 0
            self._search()
        if self.matched >= CERTAIN:
            self._certain = self._next

    def continuation(self, count: int) -> list[int]:
        """Return at most `count` tokens that come next if the prediction is right; none if the output has left it."""
        return self.tokens[self._next : self._next + count] if self.matched else []

    def _search(self) -> None:
        """Find the longest run of tokens that the output ends with."""
        for length in range(1, len(self._end) + 1):
            run = self._end[-length:]
            place = self._string.find(run, max(self._certain - length + 1, 0))
            place = self._string.rfind(run) if place < 0 else place
            if place < 0:
                return
            self.matched, self._next = length, place + length
