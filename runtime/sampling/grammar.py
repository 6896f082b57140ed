"""Constraints by llguidance: a grammar's bitmask at any node of a tree, and the tokens that it forces."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from specbuild.runtime.errors import ExecutionError, OptionError, one_line

from .constraint import Bitmask, Foreseeing, pack, words
from .grammar_compiler import Compiler, Vocabulary
from .grammar_process import compiled, tokenizer_of
from .structured import StructuredOutputs

CACHE_BYTES = 64 << 20  # maximum bytes of compiled grammars kept for reuse
_LEAST = 1 << 16  # minimum bytes that a kept grammar counts for


class Grammar:
    """A compiled structured output; see `Constraint`. The matchers of its texts share their large parts."""

    __slots__ = ("__weakref__", "_ends", "_matcher", "_vocab_size")

    def __init__(self, matcher: Any, vocab_size: int, ends: Sequence[int]) -> None:
        """Wrap a compiled grammar.

        Args:
            matcher: A matcher of llguidance that has consumed nothing.
            vocab_size: Vocabulary size of its masks.
            ends: Ids of the tokens that end a text.
        """
        self._matcher, self._vocab_size, self._ends = matcher, vocab_size, tuple(ends)

    def matcher(self, vocab_size: int) -> GrammarMatcher:
        """See `Constraint.matcher`."""
        return GrammarMatcher(self._matcher.deep_copy(), self._vocab_size, vocab_size, self._ends)


class GrammarMatcher:
    """See `Matcher`. A node's mask is kept until the text has passed it, because draft and target both ask for it."""

    def __init__(self, state: Any, masked: int, vocab_size: int, ends: Sequence[int]) -> None:
        self._state, self._words, self._masked, self._ends = state, words(vocab_size), masked, ends
        self._end = pack((token for token in ends if token < vocab_size), vocab_size)
        self._masks = dict[tuple[int, ...], Bitmask]()
        self._first, self._emitted = state.deep_copy(), list[int]()
        self.reason = ""  # why no token is legal at some node

    def mask(self, path: Sequence[int]) -> Bitmask:
        """See `Matcher.mask`."""
        key = tuple(path)
        if (known := self._masks.get(key)) is not None:
            return known
        consumed = self._consume(key)
        found = self._end if consumed < len(key) or self._state.is_stopped() else self._bits()
        self._back(consumed)
        self._masks[key] = found
        return found

    def emit(self, token: int) -> None:
        """See `Matcher.emit`."""
        self._consume((token,))
        self._emitted.append(token)
        self._masks = {path[1:]: mask for path, mask in self._masks.items() if path[:1] == (token,)}

    def follow(self, path: Sequence[int], guess: Sequence[int], count: int) -> list[int]:
        """See `Foreseeing`. A token that ends the text is returned only alone: after others it gains nothing."""
        consumed = self._consume(path)
        if consumed < len(path):
            self._back(consumed)
            return [self._ends[0]][:count]
        found = list(guess[:count])
        del found[self._state.try_consume_tokens(found) if found else 0 :]
        while len(found) < count and not self._state.is_stopped():
            run = self._state.compute_ff_tokens()[: count - len(found)]
            taken = self._state.try_consume_tokens(run) if run else 0
            found += run[:taken]
            if not taken:
                break
        stopped = self._state.is_stopped() and not self._state.is_error()
        self._back(consumed + len(found))
        return found or [self._ends[0]] * (stopped and count > 0)

    def _consume(self, path: Sequence[int]) -> int:
        """Consume a path up to its end or the text's; return the number of tokens consumed, or raise ExecutionError."""
        consumed: int = self._state.try_consume_tokens(list(path)) if path else 0
        if consumed < len(path) and not self._state.is_stopped():
            self._back(consumed)
            raise ExecutionError(f"token {path[consumed]} is not what the structured output allows")
        return consumed

    def _bits(self) -> Bitmask:
        row = np.zeros(words(self._masked), dtype=np.uint32)
        self._state.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._state.is_error():  # a limit is reached, or no token can continue: nothing is legal here
            self.reason = one_line(ValueError(self._state.get_error()))
        return row[: self._words] if not self._state.is_error() else np.zeros_like(row[: self._words])

    def _back(self, tokens: int) -> None:
        """Roll back the last tokens. After an error, which no rollback clears, replay the emitted tokens."""
        if not self._state.is_error():
            self._state.rollback(tokens)
            return
        self._state = self._first.deep_copy()
        self._state.try_consume_tokens(self._emitted)


class Free:
    """Allows anything but the text's end before `token`, and `inner` after it; see `Constraint`."""

    def __init__(self, token: int, ends: Sequence[int], inner: Grammar) -> None:
        self._token, self._ends, self._inner = token, ends, inner

    def matcher(self, vocab_size: int) -> FreeMatcher:
        """See `Constraint.matcher`."""
        barred = set(self._ends) - {self._token}
        return FreeMatcher(self._token, barred, self._inner.matcher(vocab_size), vocab_size)


class FreeMatcher:
    """The matcher of `Free`; see `Matcher`."""

    def __init__(self, token: int, barred: set[int], inner: GrammarMatcher, vocab_size: int) -> None:
        self._token, self._barred, self._inner, self._begun = token, barred, inner, False
        self._free = ~pack((each for each in barred if each < vocab_size), vocab_size)

    def mask(self, path: Sequence[int]) -> Bitmask:
        """See `Matcher.mask`."""
        after = self._after(path)
        return self._free if after is None else self._inner.mask(after)

    def emit(self, token: int) -> None:
        """See `Matcher.emit`."""
        if self._begun:
            self._inner.emit(token)
        self._begun = self._begun or token == self._token

    def follow(self, path: Sequence[int], guess: Sequence[int], count: int) -> list[int]:
        """See `Foreseeing`."""
        if (after := self._after(path)) is not None:
            return self._inner.follow(after, guess, count)
        free = list(takewhile(lambda token: token not in self._barred, guess[:count]))
        if self._token not in free:
            return free
        begun = free.index(self._token) + 1
        return free[:begun] + self._inner.follow((), free[begun:], count - begun)

    def _after(self, path: Sequence[int]) -> Sequence[int] | None:
        """Return the part of a path after the token; None if the token has not come."""
        if self._begun:
            return path
        return path[list(path).index(self._token) + 1 :] if self._token in path else None


class Grammars:
    """A cache of a bundle's compiled structured outputs, bounded in bytes; safe to use from several threads.

    A grammar in use is never compiled again. llguidance is imported with the first grammar.

    Args:
        vocabulary: Returns the model's vocabulary; called once, when first needed.
        compiler: Checks that grammars compile within limits; None: a new one.
        cache_bytes: Maximum bytes of the grammars kept for reuse.
    """

    def __init__(
        self, vocabulary: Callable[[], Vocabulary], compiler: Compiler | None = None, cache_bytes: int = CACHE_BYTES
    ) -> None:
        self._made: Vocabulary | None = None
        self._lock, self._most, self._tokenizer = threading.Lock(), cache_bytes, None
        self._make, self._compiler = vocabulary, compiler or Compiler(self._vocabulary)
        self._kept = OrderedDict[str, tuple[Grammar, int]]()
        self._used = weakref.WeakValueDictionary[str, Grammar]()

    def constraint(self, outputs: StructuredOutputs, ids: Callable[[str], int | None]) -> Grammar | Free:
        """Return the constraint of a structured output, compiled unless it is cached.

        Args:
            outputs: The structured output.
            ids: Returns the id of a special token's text, or None.

        Raises:
            OptionError: llguidance is not installed, or the output cannot be compiled within the limits.
            ExecutionError: The process that compiles did not start.
        """
        _check_installed()
        vocabulary, grammar = self._vocabulary(), self._compiled(outputs)
        if outputs.after is None:
            return grammar
        if (token := ids(outputs.after)) is None:
            raise OptionError(f"structured_outputs: after is {outputs.after!r}, which is no token of this model")
        return Free(token, vocabulary.ends, grammar)

    def _vocabulary(self) -> Vocabulary:
        with self._lock:
            self._made = self._made or self._make()
            return self._made

    def _compiled(self, outputs: StructuredOutputs) -> Grammar:
        key = outputs.key
        with self._lock:
            if found := self._used.get(key):
                if key in self._kept:
                    self._kept.move_to_end(key)
                return found
        text, size = self._compiler.check(outputs)
        vocabulary = self._vocabulary()
        try:
            matcher = compiled(self._own(vocabulary), text)
        except ValueError as error:
            raise OptionError(f"structured_outputs cannot be used: {one_line(error)}") from None
        made, size = Grammar(matcher, vocabulary.vocab_size, vocabulary.ends), max(size, _LEAST, 8 * len(text))
        with self._lock:
            self._used[key], self._kept[key] = made, (made, size)
            while self._kept and sum(each for _, each in self._kept.values()) > self._most:
                self._kept.popitem(last=False)
        return made

    def _own(self, vocabulary: Vocabulary) -> Any:
        with self._lock:
            if self._tokenizer is None:
                given = vocabulary.tokenizer, vocabulary.vocab_size, list(vocabulary.ends)
                self._tokenizer = tokenizer_of(*given)
            return self._tokenizer

    def close(self) -> None:
        """End the process that compiles."""
        self._compiler.close()


def _check_installed() -> None:
    try:
        import llguidance  # noqa: F401
    except ImportError:
        raise OptionError(
            "structured outputs need llguidance: install it with pip install 'specbuild-trt[structured]'"
        ) from None


_: tuple[type[Foreseeing], ...] = (GrammarMatcher, FreeMatcher)
