"""Constraints by llguidance: a grammar's bitmask at any node of a tree, and the tokens that it forces."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import islice, takewhile
from typing import Any, TypeVar

import numpy as np

from specbuild.runtime.errors import ExecutionError, OptionError, one_line

from .constraint import Bitmask, Explaining, Foreseeing, pack, words
from .grammar_compiler import Compiler
from .grammar_process import FUEL, Tokenizers, compiled, error_of
from .structured import StructuredOutputs
from .vocabulary import Vocabulary

CACHE_BYTES = 64 << 20  # maximum bytes of compiled grammars kept for reuse
_LEAST = 1 << 16  # minimum bytes that a kept grammar counts for
T = TypeVar("T")


class Grammar:
    """A compiled structured output; see `Constraint`. The matchers of its texts share their large parts.

    Attributes:
        spent: Whether a limit of what its matchers share is reached: it has to be compiled again.
    """

    __slots__ = ("__weakref__", "_ends", "_masked", "_matcher", "spent")

    def __init__(self, matcher: Any, masked: int, ends: Sequence[int]) -> None:
        """Wrap a compiled grammar.

        Args:
            matcher: A matcher of llguidance that has consumed nothing.
            masked: Number of tokens in its masks.
            ends: Ids of the tokens that end a text.
        """
        self._matcher, self._masked, self._ends = matcher, masked, tuple(ends)
        self.spent = False

    def matcher(self, vocab_size: int) -> GrammarMatcher:
        """See `Constraint.matcher`."""
        return GrammarMatcher(self, self._matcher.deep_copy(), self._masked, vocab_size, self._ends)


class GrammarMatcher:
    """See `Matcher`. A node's mask is kept until the text has passed it, because draft and target both ask for it.

    Where llguidance gives up, no token is legal: a drafted path that the text does not take harms nothing.
    """

    def __init__(self, of: Grammar, state: Any, masked: int, vocab_size: int, ends: Sequence[int]) -> None:
        self._of, self._state, self._masked, self._vocab_size, self._ends = of, state, masked, vocab_size, ends
        self._end = pack((token for token in ends if token < vocab_size), vocab_size)
        self._last = np.uint32((1 << (vocab_size - 1) % 32 + 1) - 1)  # the vocabulary's part of a mask's last word
        self._none = np.zeros_like(self._end)
        self._masks, self._reasons = dict[tuple[int, ...], Bitmask](), dict[tuple[int, ...], str]()
        self._first, self._emitted = state.deep_copy(), list[int]()

    def mask(self, path: Sequence[int]) -> Bitmask:
        """See `Matcher.mask`."""
        key = tuple(path)
        if (known := self._masks.get(key)) is not None:
            return known
        consumed = self._consume(key)
        found = self._legal(key, consumed)
        self._back(consumed)
        self._masks[key] = found
        return found

    def emit(self, token: int) -> None:
        """See `Matcher.emit`."""
        self._consume((token,))
        self._emitted.append(token)
        self._masks = _after(token, self._masks)
        self._reasons = _after(token, self._reasons)

    def follow(self, path: Sequence[int], guess: Sequence[int], count: int) -> list[int]:
        """See `Foreseeing`. A token that ends the text is returned only alone: after others it gains nothing."""
        consumed = self._consume(path)
        if consumed < len(path):
            ended = not self._state.is_error()
            self._back(consumed)
            return [self._ends[0]] * (ended and count > 0)
        found = list(guess[:count])
        del found[self._state.try_consume_tokens(found) if found else 0 :]
        while len(found) < count and not self._state.is_stopped():
            forced = takewhile(lambda token: token < self._vocab_size, self._state.compute_ff_tokens())
            run = list(islice(forced, count - len(found)))
            taken = self._state.try_consume_tokens(run) if run else 0
            found += run[:taken]
            if not taken:
                break
        stopped = self._state.is_stopped() and not self._state.is_error()
        self._back(consumed + len(found))
        return found or [self._ends[0]] * (stopped and count > 0)

    def why(self, path: Sequence[int]) -> str:
        """See `Explaining`."""
        return self._reasons.get(tuple(path), "")

    def _consume(self, path: Sequence[int]) -> int:
        """Consume a path up to its end, the text's or an error of llguidance, and return the number of tokens consumed.

        Raises:
            ExecutionError: A token is not legal where it is.
        """
        consumed: int = self._state.try_consume_tokens(list(path)) if path else 0
        if consumed < len(path) and not self._state.is_stopped():
            self._state.compute_bitmask()  # which tells an illegal token from a limit that is reached
            if self._state.is_error():
                return consumed
            self._back(consumed)
            raise ExecutionError(f"token {path[consumed]} is not what the structured output allows")
        return consumed

    def _legal(self, path: tuple[int, ...], consumed: int) -> Bitmask:
        """Return what is legal after a path of which so many tokens were consumed."""
        found = self._none
        if self._state.is_stopped():
            found = self._end
        elif consumed == len(path):
            row = np.zeros(words(self._masked), dtype=np.uint32)
            self._state.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            found = row[: len(self._end)]
            found[-1] &= self._last
            if (found & self._end).any() and not self._state.is_accepting():
                found &= ~self._end  # a grammar may name such a token, but the text would end with it
        if self._state.is_error():  # a limit is reached, or no token can continue
            found, self._reasons[path] = self._none, self._error()
        elif not found.any():
            self._reasons[path] = "this model's tokens cannot write it"
        return found

    def _error(self) -> str:
        """Return what the state's error says; note if it is one that all matchers of the grammar share."""
        error = error_of(self._state)
        self._of.spent = self._of.spent or error.startswith("lexer error")
        return one_line(ValueError(error))

    def _back(self, tokens: int) -> None:
        """Roll back the last tokens. After an error, which no rollback clears, replay the emitted tokens."""
        if not self._state.is_error():
            self._state.rollback(tokens)
            return
        self._state = self._first.deep_copy()
        self._state.try_consume_tokens(self._emitted)


def _after(token: int, found: dict[tuple[int, ...], T]) -> dict[tuple[int, ...], T]:
    """Return what is known of the paths that begin with a token, by the rest of each path."""
    return {path[1:]: value for path, value in found.items() if path[:1] == (token,)}


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

    def why(self, path: Sequence[int]) -> str:
        """See `Explaining`."""
        after = self._after(path)
        return "" if after is None else self._inner.why(after)

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
        fuel: llguidance's limits of a matcher.
    """

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        compiler: Compiler | None = None,
        cache_bytes: int = CACHE_BYTES,
        fuel: Mapping[str, Any] = FUEL,
    ) -> None:
        self._made: tuple[Vocabulary, Tokenizers] | None = None
        self._lock, self._most, self._fuel = threading.Lock(), cache_bytes, fuel
        self._make, self._compiler = vocabulary, compiler or Compiler(lambda: self._vocabulary()[0])
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
        self._vocabulary()
        return self._begun(self._compiled(outputs), outputs, ids)

    def known(self, outputs: StructuredOutputs, ids: Callable[[str], int | None]) -> Grammar | Free | None:
        """Return what `constraint` would if the output is cached; else None. It waits for no other's compilation.

        Args:
            outputs: The structured output.
            ids: Returns the id of a special token's text, or None.
        """
        grammar = self._cached(outputs.key) if self._made else None
        return self._begun(grammar, outputs, ids) if grammar else None

    def _begun(self, grammar: Grammar, outputs: StructuredOutputs, ids: Callable[[str], int | None]) -> Grammar | Free:
        """Return the constraint that begins where the output says."""
        if outputs.after is None:
            return grammar
        if (token := ids(outputs.after)) is None:
            raise OptionError(f"structured_outputs: after is {outputs.after!r}, which is no token of this model")
        return Free(token, self._vocabulary()[0].ends, grammar)

    def _vocabulary(self) -> tuple[Vocabulary, Tokenizers]:
        with self._lock:
            if self._made is None:
                vocabulary = self._make()
                self._made = vocabulary, Tokenizers(vocabulary)
            return self._made

    def _cached(self, key: str) -> Grammar | None:
        with self._lock:
            if (found := self._used.get(key)) and not found.spent:
                if key in self._kept:
                    self._kept.move_to_end(key)
                return found
        return None

    def _compiled(self, outputs: StructuredOutputs) -> Grammar:
        key = outputs.key
        if found := self._cached(key):
            return found
        text, size = self._compiler.check(outputs)
        vocabulary, tokenizers = self._vocabulary()
        try:
            tokenizer = tokenizers.tokenizer(outputs.to_dict())
            matcher = compiled(tokenizer, text, self._fuel)
        except ValueError as error:
            raise OptionError(f"structured_outputs cannot be used: {one_line(error)}") from None
        made, size = Grammar(matcher, tokenizer.vocab_size, vocabulary.ends), max(size, _LEAST, 8 * len(text))
        with self._lock:
            self._used[key], self._kept[key] = made, (made, size)
            while self._kept and sum(each for _, each in self._kept.values()) > self._most:
                self._kept.popitem(last=False)
        return made

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
__: tuple[type[Explaining], ...] = (GrammarMatcher, FreeMatcher)
