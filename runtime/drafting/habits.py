"""Habits: what the target last emitted after one or two tokens, in any text, as a draft that needs no model.

Source: Luo et al., "Token Recycling" (arXiv 2408.08696); here with one candidate for each key, and keys of two tokens
too. Statistics of common texts come with the bundle, for an engine that has no habits yet.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from specbuild.runtime.checked_json import checked
from specbuild.runtime.errors import BundleError

FILE = "habits.json"
SLOTS = 1 << 16  # entries, a megabyte in all; a new one replaces an older one
LONGEST = 8  # maximum tokens recalled at once
_NONE = -1
_Before = Annotated[list[Annotated[int, Meta(ge=-1, lt=1 << 31)]], Meta(max_length=1 << 20)]
_Tokens = Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 31)]], Meta(max_length=1 << 20)]


@dataclass(slots=True)
class _Record:
    schema: Literal[1]
    before: _Before
    last: _Tokens
    next: _Tokens


@dataclass(frozen=True, slots=True)
class Common:
    """Statistics of common texts: ascending keys `int64[N]` of one or two tokens, and what follows each, `int64[N]`."""

    keys: NDArray[np.int64]
    next: NDArray[np.int64]

    @classmethod
    def of(cls, record: Any, vocabulary: int) -> Common:
        """Read JSON of three lists; a `before` of −1 makes a key of one token. Raises BundleError if it is invalid."""
        try:
            found = checked(record, _Record)
            before, last, follows = (np.array(x, np.int64) for x in (found.before, found.last, found.next))
            if not len(before) == len(last) == len(follows) or max(found.next, default=0) >= vocabulary:
                raise ValueError("lists of different lengths, or no tokens of the target's")
        except ValueError as error:
            raise BundleError(f"{FILE} names no habits ({str(error)[:300]}): build the bundle again") from None
        keys = (before + 1) << 32 | last
        order = keys.argsort()
        return cls(keys[order], follows[order])

    def after(self, tokens: Seq[int]) -> int | None:
        """Return what mostly follows one or two tokens; None: not known."""
        key = tokens[-1] if len(tokens) < 2 else (tokens[-2] + 1) << 32 | tokens[-1]
        at = int(self.keys.searchsorted(key))
        return int(self.next[at]) if at < len(self.keys) and self.keys[at] == key else None


class Habits:
    """Habits, kept apart by cache salt so that no request learns from texts whose cached prefixes it may not use."""

    def __init__(self, common: Common | None = None, slots: int = SLOTS) -> None:
        self.common = common
        self._keys, self._next = array("q", [_NONE]) * slots, array("q", [_NONE]) * slots

    def fresh(self) -> Habits:
        """Return habits that have learnt nothing yet, with the same statistics."""
        return Habits(self.common, len(self._keys))

    def guess(self, tokens: Seq[int], salt: str | None, here: int) -> int | None:
        """Return what is likely to follow a text; `here`: what its last token led to earlier in it, negative: nothing.

        Two tokens tell more than one, and what the target emitted tells more than common texts. None: nothing is known.
        """
        last, common = tokens[-2:], self.common
        token = self.after(last, salt)
        if token is None and here >= 0:
            token = here
        if token is None and common:
            token = common.after(last)
        if token is None:
            token = self.after(last[-1:], salt)
        return common.after(last[-1:]) if token is None and common else token

    def recall(self, tokens: Seq[int], salt: str | None) -> list[int]:
        """Return what the target emitted after a text's last two tokens, as far as known, at most LONGEST tokens."""
        last, found = tokens[-2:], list[int]()
        while len(found) < LONGEST and (token := self.after(last, salt)) is not None:
            found.append(token)
            last = [last[-1], token]
        return found

    def after(self, tokens: Seq[int], salt: str | None) -> int | None:
        """Return what followed one or two tokens the last time; None: not known."""
        key = _key(tokens, salt)
        slot = key % len(self._keys)
        return self._next[slot] if self._keys[slot] == key and self._next[slot] != _NONE else None

    def foretold(self, tokens: Seq[int], count: int, salt: str | None) -> bool:
        """Return whether what is known foretold each of the last `count` tokens of a text."""
        ends = range(len(tokens) - count, len(tokens))
        return all(end > 1 and self.after(tokens[end - 2 : end], salt) == tokens[end] for end in ends)

    def learn(self, tokens: Seq[int], count: int, salt: str | None) -> None:
        """Learn from the last `count` tokens of a text."""
        recent, keys, follows = tokens[-count - 2 :], self._keys, self._next
        for before, last, token in zip(recent, recent[1:], recent[2:], strict=False):
            for key in (_key((last,), salt), _key((before, last), salt)):
                slot = key % len(keys)
                keys[slot], follows[slot] = key, token


def _key(tokens: Seq[int], salt: str | None) -> int:
    return hash((*tokens, salt))
