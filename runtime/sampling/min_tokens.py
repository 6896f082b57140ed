"""A minimum number of output tokens, as a constraint: until then no token that ends the text is legal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from .constraint import Bitmask, Constraint, Explaining, Foreseeing, Matcher, ask, pack


class MinTokens:
    """Makes the tokens `ends` illegal before `count` output tokens, in addition to `inner`; see `Constraint`."""

    def __init__(self, count: int, ends: Iterable[int], inner: Constraint | None = None) -> None:
        self._count, self._ends, self._inner = count, tuple(ends), inner

    def matcher(self, vocab_size: int) -> Matcher:
        """See `Constraint.matcher`."""
        mask = ~pack((token for token in self._ends if token < vocab_size), vocab_size)
        inner = self._inner.matcher(vocab_size) if self._inner else None
        kind = _Foreseeing if isinstance(inner, Foreseeing) else _Matcher
        return kind(self._count, mask, vocab_size, inner)


class _Matcher:
    def __init__(self, left: int, mask: Bitmask, vocab_size: int, inner: Matcher | None) -> None:
        self._left, self._mask, self._vocab_size, self._inner = left, mask, vocab_size, inner

    def mask(self, path: Sequence[int]) -> Bitmask | None:
        """See `Matcher.mask`."""
        legal = ask(self._inner, path, self._vocab_size) if self._inner else None
        if len(path) >= self._left:
            return legal
        return self._mask if legal is None else legal & self._mask

    def why(self, path: Sequence[int]) -> str:
        """See `Explaining`."""
        if isinstance(self._inner, Explaining) and (why := self._inner.why(path)):
            return why
        mask, left = self.mask(path), self._left - len(path)
        return "" if mask is None or mask.any() or left <= 0 else f"it ends {left} tokens before min_tokens"

    def emit(self, token: int) -> None:
        """See `Matcher.emit`."""
        self._left -= 1
        if self._inner:
            self._inner.emit(token)


class _Foreseeing(_Matcher):
    def follow(self, path: Sequence[int], guess: Sequence[int], count: int) -> list[int]:
        """See `Foreseeing`; the returned tokens end before the first one that is not legal yet."""
        assert isinstance(self._inner, Foreseeing)
        found = self._inner.follow(path, guess, count)
        for place, token in enumerate(found[: max(self._left - len(path), 0)]):
            if not self._mask[token // 32] >> np.uint32(token % 32) & 1:
                return found[:place]
        return found
