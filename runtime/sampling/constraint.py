"""Constraints: which tokens may continue a text, as bitmasks that the sampler applies before its cut-offs.

A bitmask is `uint32[ceil(V / 32)]`: token t is legal if bit t % 32 of word t // 32 is set. Bits past the vocabulary are
ignored.
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
    """The state of one text in its constraint; used by one thread at a time."""

    def mask(self, path: Sequence[int]) -> Bitmask | None:
        """Return the tokens that are legal after the emitted tokens and a path.

        What it raises becomes the error of its request.

        Args:
            path: Drafted token ids, each legal after the ones before it.

        Returns:
            A bitmask `uint32[ceil(V / 32)]`, which the caller may read until the next call; None: all are legal.
        """
        ...

    def emit(self, token: int) -> None:
        """Record the emitted token id `token`, which was legal."""
        ...


@runtime_checkable
class Foreseeing(Matcher, Protocol):
    """A matcher that knows which tokens must come next. They are only drafted, so a wrong answer changes no text."""

    def follow(self, path: Sequence[int], guess: Sequence[int], count: int) -> list[int]:
        """Return tokens to draft after a path.

        Args:
            path: Drafted token ids, each legal after the ones before it.
            guess: Token ids that may come next.
            count: Maximum tokens to return.

        Returns:
            The legal beginning of `guess`, then tokens that have no legal alternative.
        """
        ...


@runtime_checkable
class Explaining(Matcher, Protocol):
    """A matcher that knows why no token is legal at some node."""

    def why(self, path: Sequence[int]) -> str:
        """Return why no token is legal after a path, after its mask was asked for; "" if that is not known."""
        ...


@runtime_checkable
class Constraint(Protocol):
    """A rule for the texts of a request; immutable, so that any number of requests may share one."""

    def matcher(self, vocab_size: int) -> Matcher:
        """Return a matcher for a text at its beginning; `vocab_size` is the V of its bitmasks."""
        ...


def pack(tokens: Iterable[int], vocab_size: int) -> Bitmask:
    """Return the bitmask `uint32[ceil(V / 32)]` in which only these tokens are legal."""
    legal = np.zeros(32 * words(vocab_size), dtype=np.bool_)
    legal[np.fromiter(tokens, dtype=np.int64)] = True
    return np.packbits(legal, bitorder="little").view(np.uint32)


def unpack(mask: Bitmask, vocab_size: int) -> NDArray[np.bool_]:
    """Return which tokens of a bitmask are legal, `bool[V]`."""
    bits = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), count=vocab_size, bitorder="little")
    return bits.view(np.bool_)


def only(mask: Bitmask, vocab_size: int) -> int | None:
    """Return the only legal token of a bitmask; None if there is none or several."""
    places = np.flatnonzero(mask)
    word = int(mask[places[0]]) if len(places) == 1 else 0
    token = 32 * int(places[0]) + word.bit_length() - 1 if word and not word & (word - 1) else vocab_size
    return token if token < vocab_size else None


def words(vocab_size: int) -> int:
    """Return the number of words in a bitmask, ceil(V / 32)."""
    return -(-vocab_size // 32)


def ask(matcher: Matcher, path: Sequence[int], vocab_size: int) -> Bitmask | None:
    """Return a matcher's bitmask; raise ExecutionError if it is not a bitmask for this vocabulary."""
    mask = matcher.mask(path)
    if mask is not None and not isinstance(mask, np.ndarray):
        raise ExecutionError(f"the constraint's mask is {shown(mask)}, not uint32[{words(vocab_size)}], a bit a token")
    if mask is not None and (mask.dtype != np.uint32 or mask.shape != (words(vocab_size),)):
        raise ExecutionError(
            f"the constraint's mask is {mask.dtype}{list(mask.shape)}, not uint32[{words(vocab_size)}], a bit a token"
        )
    return mask


def tree_masks(matcher: Matcher, tree: Tree, vocab_size: int, out: NDArray[np.uint32]) -> None:
    """Write the bitmask after each node of a tree.

    Illegal nodes and nodes below them are skipped, because the target never chooses from there.

    Args:
        matcher: The text's matcher.
        tree: The drafted tree.
        vocab_size: Size V of the vocabulary.
        out: The bitmasks, `uint32[≥ nodes, ceil(V / 32)]`, all ones on entry; a row per node is written.
    """
    legal = [True] * len(tree)
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if node:
            legal[node] = legal[parent] and bool(out[parent, token // 32] >> np.uint32(token % 32) & np.uint32(1))
        if legal[node] and (mask := ask(matcher, tree.path(node), vocab_size)) is not None:
            out[node] = mask
