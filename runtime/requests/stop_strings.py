"""Stop strings, all of them matched at once: the automaton of Aho and Corasick (1975)."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class Match(NamedTuple):
    """Where a stop string begins, relative to the piece that completes it (before it: negative), and its length."""

    start: int
    length: int


class StopStrings:
    """Reads a text piece by piece. A state is the longest end of the text that some stop string begins with.

    A character costs the same however many stop strings there are. Nothing changes after it is made, so any number of
    texts may have the same.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self.depth = [0]  # of a state: how many characters it is
        self._complete = [0]  # the length of the longest stop string that a state ends with; 0 for none
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
        self._shorter = [0] * len(self._next)  # the longest proper end of a state that is a state too
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
        """The state after a piece, and the stop string ending in it that begins first, the shortest if several."""
        found: Match | None = None
        for end, character in enumerate(piece, 1):
            state = self._step(state, character)
            length = self._complete[state]
            if length and (found is None or end - length < found.start):
                found = Match(end - length, length)
        return state, found


@functools.lru_cache(maxsize=64)
def automaton(stop: tuple[str, ...]) -> StopStrings:
    """The automaton of some stop strings, made once for all requests that have the same."""
    return StopStrings(stop)
