"""Constraints: which tokens a text may go on with, as bitmasks that the sampler applies before its cut-offs.

A bitmask is `uint32[ceil(V / 32)]`: token t is legal where bit t % 32 of word t // 32 is set. Bits past the vocabulary
are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.errors import ExecutionError, shown
from specbuild.runtime.speculation.tree import Tree

Bitmask = NDArray[np.uint32]


class Matcher(Protocol):
    """How far one text has come in its constraint; used by one thread at a time."""

    def mask(self, path: Sequence[int]) -> Bitmask | None:
        """The legal tokens after what was emitted and `path`, whose tokens are legal one after another; None: all.

        What it raises becomes its request's error. The array is the caller's to read until the next call.
        """
        ...

    def emit(self, token: int) -> None:
        """Take note of an emitted token, which was legal."""
        ...


@runtime_checkable
class Foreseeing(Matcher, Protocol):
    """A matcher that knows what has to come; what it says is drafted, so it may be wrong and no text differs."""

    def follow(self, path: Sequence[int], guess: Sequence[int], count: int) -> list[int]:
        """`guess`, after `path`, as far as it is legal, then what has no alternative: at most `count` tokens."""
        ...


@runtime_checkable
class Constraint(Protocol):
    """What the texts of a request may be; never changed, so any number of requests may have the same."""

    def matcher(self, vocab_size: int) -> Matcher:
        """A matcher for a text of which nothing was emitted yet."""
        ...


def pack(tokens: Iterable[int], vocab_size: int) -> Bitmask:
    """The bitmask in which these tokens are legal and no others."""
    legal = np.zeros(32 * words(vocab_size), dtype=np.bool_)
    legal[np.fromiter(tokens, dtype=np.int64)] = True
    return np.packbits(legal, bitorder="little").view(np.uint32)


def unpack(mask: Bitmask, vocab_size: int) -> NDArray[np.bool_]:
    """Which tokens are legal, `bool[V]`."""
    bits = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), count=vocab_size, bitorder="little")
    return bits.view(np.bool_)


def only(mask: Bitmask, vocab_size: int) -> int | None:
    """The only legal token, where there is but one."""
    places = np.flatnonzero(mask)
    word = int(mask[places[0]]) if len(places) == 1 else 0
    token = 32 * int(places[0]) + word.bit_length() - 1 if word and not word & (word - 1) else vocab_size
    return token if token < vocab_size else None


def words(vocab_size: int) -> int:
    """Words of a bitmask."""
    return -(-vocab_size // 32)


def ask(matcher: Matcher, path: Sequence[int], vocab_size: int) -> Bitmask | None:
    """What a matcher says is legal; raises ExecutionError for what is no bitmask of this vocabulary."""
    mask = matcher.mask(path)
    if mask is not None and not isinstance(mask, np.ndarray):
        raise ExecutionError(f"the constraint's mask is {shown(mask)}, not uint32[{words(vocab_size)}], a bit a token")
    if mask is not None and (mask.dtype != np.uint32 or mask.shape != (words(vocab_size),)):
        raise ExecutionError(
            f"the constraint's mask is {mask.dtype}{list(mask.shape)}, not uint32[{words(vocab_size)}], a bit a token"
        )
    return mask


def tree_masks(matcher: Matcher, tree: Tree, vocab_size: int, out: NDArray[np.uint32]) -> None:
    """Write what is legal after each node of a tree, `out uint32[≥ nodes, words]`, its rows all ones by now.

    Nothing is asked of a node that is illegal itself, or below such a node: nobody will choose from there.
    """
    legal = [True] * len(tree)
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if node:
            legal[node] = legal[parent] and bool(out[parent, token // 32] >> np.uint32(token % 32) & np.uint32(1))
        if legal[node] and (mask := ask(matcher, tree.path(node), vocab_size)) is not None:
            out[node] = mask
