"""Matching of all stop strings at once, by the automaton of Aho and Corasick (1975)."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class Match(NamedTuple):
    """The beginning of a stop string, relative to the piece that completes it (negative: before it), and its length."""

    start: int
    length: int


class StopStrings:
    """The automaton of some stop strings, which reads a text piece by piece.

    A state stands for the longest suffix of the text that is a prefix of some stop string. The cost per character does
    not depend on the number of stop strings. An automaton never changes, so any number of texts may share it.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self.depth = [0]  # by state: the length of its suffix
        self._complete = [0]  # by state: the length of the longest stop string that it ends with; 0: none
        for text in stop:
            state = 0
            for character in text:
                if character not in self._next[state]:
                    self._next[state][character] = len(self._next)
                    self._next.append({})
                    self.depth.append(self.depth[state] + 1)
                    self._complete.append(0)
                state = self._next[state][character]
            self._complete[state] = len(text)
        self._shorter = [0] * len(self._next)  # by state: its longest proper suffix that is a state too
        self._link()

    def _link(self) -> None:
        waiting = deque([0])
        while waiting:
            state = waiting.popleft()
            for character, child in self._next[state].items():
                self._shorter[child] = self._step(self._shorter[state], character) if state else 0
                self._complete[child] = self._complete[child] or self._complete[self._shorter[child]]
                waiting.append(child)

    def _step(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(character, 0)

    def read(self, state: int, piece: str) -> tuple[int, Match | None]:
        """Read a piece of text.

        Args:
            state: The state before the piece; 0 at the beginning of a text.
            piece: The piece.

        Returns:
            The state after the piece, and the stop string that ends in it: the one that begins first and, of those,
            the shortest; None if none ends in it.
        """
        found: Match | None = None
        for end, character in enumerate(piece, 1):
            state = self._step(state, character)
            length = self._complete[state]
            if length and (found is None or end - length < found.start):
                found = Match(end - length, length)
        return state, found


@functools.lru_cache(maxsize=64)
def automaton(stop: tuple[str, ...]) -> StopStrings:
    """Return the automaton of some stop strings, cached for requests with the same ones."""
    return StopStrings(stop)
