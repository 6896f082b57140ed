"""A least number of output tokens, as a constraint: until then no token that would end the text is legal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from .constraint import Bitmask, Constraint, Matcher, ask, words


class MinTokens:
    """Makes `ends` illegal before `count` output tokens, beside what `inner` makes illegal; see `Constraint`."""

    def __init__(self, count: int, ends: Iterable[int], inner: Constraint | None = None) -> None:
        self._count, self._ends, self._inner = count, tuple(ends), inner

    def matcher(self, vocab_size: int) -> Matcher:
        """See `Constraint.matcher`."""
        legal = np.full(32 * words(vocab_size), True)
        legal[[token for token in self._ends if token < vocab_size]] = False
        mask = np.packbits(legal, bitorder="little").view(np.uint32)
        return _Matcher(self._count, mask, vocab_size, self._inner.matcher(vocab_size) if self._inner else None)


class _Matcher:
    def __init__(self, left: int, mask: Bitmask, vocab_size: int, inner: Matcher | None) -> None:
        self._left, self._mask, self._vocab_size, self._inner = left, mask, vocab_size, inner

    def mask(self, path: Sequence[int]) -> Bitmask | None:
        """See `Matcher.mask`."""
        legal = ask(self._inner, path, self._vocab_size) if self._inner else None
        if len(path) >= self._left:
            return legal
        return self._mask if legal is None else legal & self._mask

    def emit(self, token: int) -> None:
        """See `Matcher.emit`."""
        self._left -= 1
        if self._inner:
            self._inner.emit(token)
