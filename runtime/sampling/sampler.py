"""Logit processors, and the rule by which both target and draft choose a token.

The choice at absolute position t is `argmax_x(f(logits)_x + g(seed, t, x))`. f are the request's processors, which see
the node's own path; g is Gumbel noise, the same for every node at t in target and draft, and zero at temperature 0. An
argmax over logits plus Gumbel noise is an exact sample of their softmax (Gumbel 1954; Maddison et al. 2014).
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from specbuild.runtime.errors import ExecutionError, OptionError, message_of, shown

from .constraint import Constraint, Explaining, Foreseeing, Matcher, ask, only, unpack
from .cut_offs import CutOffs
from .noise import SMALL, Noise
from .parameters import SamplingParams as SamplingParams
from .ranking import ranking
from .row import Logits, Row

MAX_ALONE = 128  # if top-p leaves only tokens among so many likeliest, no others need noise


def _matcher(constraint: Constraint, vocab_size: int) -> Matcher:
    """Return a constraint's matcher for a new text; raise OptionError if it makes no usable one."""
    try:
        matcher = constraint.matcher(vocab_size)
        usable = callable(getattr(matcher, "mask", None)) and callable(getattr(matcher, "emit", None))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a library's panic is no Exception
        raise OptionError(f"the constraint cannot be used, {type(error).__name__}: {message_of(error)}") from error
    if not usable:
        raise OptionError(f"a constraint's matcher must have mask(path) and emit(token), not be {shown(matcher)}")
    return matcher


def fresh_seed() -> int:
    """Return a random seed of 53 bits, which JSON numbers represent exactly in every language."""
    return secrets.randbits(53)


class Sampler:
    """Turns a node's logits into scores, by one sample's processors f and noise g, and scores into the choice.

    Args:
        params: The sampling parameters.
        seed: The sample's own seed.
        prompt: The prompt's token ids.
        vocab_size: Size V of the vocabulary.

    Raises:
        OptionError: A logit_bias is outside of the vocabulary, or the constraint cannot be used.
    """

    def __init__(self, params: SamplingParams, seed: int, prompt: Sequence[int], vocab_size: int) -> None:
        self.params, self.seed, self.vocab_size = params, seed, vocab_size
        p = params
        if any(token >= vocab_size for token in p.logit_bias):
            raise OptionError(f"logit_bias names a token past the vocabulary of {vocab_size}")
        self._bias_ids = np.fromiter(p.logit_bias.keys(), dtype=np.int64)
        self._bias = np.fromiter(p.logit_bias.values(), dtype=np.float32)
        self._repeats = p.repetition_penalty != 1
        self._counts = p.frequency_penalty != 0 or p.presence_penalty != 0
        self.matcher = _matcher(p.constraint, vocab_size) if p.constraint is not None else None
        self._foreseeing = self.matcher if isinstance(self.matcher, Foreseeing) else None
        self.foresees = self._foreseeing is not None  # whether the constraint knows which tokens must come next
        self._raised: BaseException | None = None  # raised by the constraint during drafting
        self._plain = not (self._repeats or self._counts or self._bias.size or self.matcher is not None)
        self._cuts = p.temperature > 0 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)
        self._seen = np.zeros(vocab_size if self._repeats else 0, dtype=np.bool_)
        if self._repeats:
            self._seen[np.asarray(prompt, dtype=np.int64)] = True
        self._output: Counter[int] = Counter()
        self._noise: dict[int, Noise] = {}

    @property
    def greedy(self) -> bool:
        """Return whether the scores are the logits themselves."""
        return self._plain and self.params.temperature == 0

    def emit(self, token: int, position: int) -> None:
        """Record a token emitted at `position`, and forget the noise of earlier positions."""
        if self._repeats:
            self._seen[token] = True
        if self._counts:
            self._output[token] += 1
        if self.matcher is not None:
            self.matcher.emit(token)
        for past in [t for t in self._noise if t < position]:
            del self._noise[past]

    def noise(self, position: int) -> Noise:
        """Return g at one position, cached until the text has passed it: target, draft and all nodes there share it."""
        if position not in self._noise:
            self._noise[position] = Noise(self.seed, position, self.vocab_size)
        return self._noise[position]

    def ranked(
        self, logits: Logits, position: int, path: Sequence[int], misses: int | None = None, count: int = 1
    ) -> Iterator[tuple[int, float]]:
        """Yield tokens and their scores f(logits) + g, best first; none that a cut-off excludes.

        Among equal scores, the lowest id comes first.

        Args:
            logits: The node's logits, `float32[V]`.
            position: Absolute position of the node, in tokens.
            path: The drafted tokens from below the root down to the node.
            misses: End after more than so many tokens that top-p excludes; None: never.
            count: How many tokens the caller expects to read; more are found too, but more slowly.
        """
        row = self._row(logits, path)
        if self._cuts and not math.isfinite(row.largest):
            return  # as `ranking` does where nothing is cut off
        noise = self.noise(position) if self.params.temperature > 0 else None
        cut_offs = self._cut_offs(row) if self._cuts else None
        if cut_offs and noise and misses is None and row.raw.size > SMALL:
            cut_offs.narrow(MAX_ALONE)
        yield from ranking(row, noise, cut_offs, misses, count)

    def scores(self, logits: Logits, position: int) -> Logits | None:
        """Return f(logits) + g of several nodes at one position, or None if each node needs `ranked`.

        That is so if f depends on the path or cuts off, at temperature 0, if the vocabulary is large, or if the best
        score of a row is not finite.

        Args:
            logits: The nodes' logits, `float32[nodes, V]`.
            position: Absolute position of the nodes, in tokens.

        Returns:
            The scores, `float32[nodes, V]`, or None.
        """
        if not self._plain or self._cuts or self.params.temperature == 0 or logits.shape[1] > SMALL:
            return None
        scores: Logits = logits / np.float32(self.params.temperature) + self.noise(position).all
        return scores if np.isfinite(scores.max(axis=1)).all() else None

    def drafted(
        self, logits: Logits, position: int, path: Sequence[int], misses: int, count: int = 1
    ) -> Iterator[tuple[int, float]]:
        """Yield as `ranked` does, for a draft. An error of the constraint ends it; the next choice raises the error."""
        try:
            yield from self.ranked(logits, position, path, misses, count)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # a library's panic is no Exception
            self._raised = error

    def follow(self, path: Sequence[int], guess: Sequence[int], count: int) -> list[int]:
        """See `Foreseeing.follow`. If the constraint raises, return []; the next choice raises the error."""
        try:
            return self._foreseeing.follow(path, guess, count) if self._foreseeing else list(guess)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a library's panic is no Exception
            self._raised = error
            return []

    def release(self) -> None:
        """Free the constraint's matcher and the noise; the text has ended."""
        self.matcher = self._foreseeing = None
        self.foresees = False
        self._noise.clear()

    def check(self) -> None:
        """Raise the error that the constraint raised during drafting, if any."""
        if self._raised:
            raise self._raised

    def choose(self, logits: Logits, position: int, path: Sequence[int]) -> int:
        """Return the choice at a node: the best token of `ranked`, or the logits' argmax if no score is finite.

        Args:
            logits: The node's logits, `float32[V]`.
            position: Absolute position of the node, in tokens.
            path: The drafted tokens from below the root down to the node.

        Raises:
            OptionError: The constraint allows no token here, and says why.
            ExecutionError: The constraint leaves no token with a finite score. Errors of the constraint itself are
                raised too.
        """
        self.check()
        if self.greedy:
            return int(logits.argmax())
        if self.matcher is not None and (token := self._forced(path)) is not None and np.isfinite(logits[token]):
            return token
        best = next(self.ranked(logits, position, path), None)
        if best is None and self.matcher is not None:
            raise self.dead_end(path)
        return best[0] if best else int(logits.argmax())

    def dead_end(self, path: Sequence[int] = ()) -> OptionError | ExecutionError:
        """Return the error of a node where no token has a finite score: the constraint's reason, if it has one."""
        if self.matcher is None:
            return ExecutionError("no token's score is finite: use milder penalties and bias")
        ask(self.matcher, path, self.vocab_size)
        if isinstance(self.matcher, Explaining) and (why := self.matcher.why(path)):
            return OptionError(f"the text cannot go on as it has to: {why}")
        return ExecutionError("no token that the constraint allows has a finite score: let it allow others")

    def _forced(self, path: Sequence[int]) -> int | None:
        """Return the only token that the constraint allows; None if it allows others, or is not `Foreseeing`."""
        mask = ask(self._foreseeing, path, self.vocab_size) if self._foreseeing else None
        return None if mask is None else only(mask, self.vocab_size)

    def processed(self, logits: Logits, path: Sequence[int]) -> Logits:
        """Return f(logits) before the cut-offs, `float32[V]`: with constraint, penalties, bias and temperature."""
        return self._row(logits, path).all()

    def _row(self, logits: Logits, path: Sequence[int]) -> Row:
        """Return what `processed` does, as a `Row` that divides by the temperature where it is read."""
        return Row(logits if self._plain else self.adjusted(logits, path), self.params.temperature)

    def adjusted(self, logits: Logits, path: Sequence[int]) -> Logits:
        """Return a copy of the logits with constraint, penalties and bias applied."""
        p, out = self.params, logits.copy()
        if self.matcher is not None and (mask := ask(self.matcher, path, len(out))) is not None:
            np.copyto(out, np.float32(-np.inf), where=~unpack(mask, len(out)))
        if self._repeats:
            seen = self._seen
            if path:
                seen = seen.copy()
                seen[np.asarray(path, dtype=np.int64)] = True
            ids, penalty = seen.nonzero()[0], np.float32(p.repetition_penalty)
            values = out[ids]
            out[ids] = np.where(values > 0, values / penalty, values * penalty)
        if self._counts:
            counts = self._output + Counter(path)
            ids = np.fromiter(counts.keys(), dtype=np.int64)
            times = np.fromiter(counts.values(), dtype=np.float32)
            out[ids] -= np.float32(p.frequency_penalty) * times + np.float32(p.presence_penalty)
        if self._bias.size:
            out[self._bias_ids] += self._bias
        return out

    def _cut_offs(self, row: Row) -> CutOffs:
        return CutOffs(row, self.params.top_k, self.params.top_p, self.params.min_p)

    def margin(self, logits: Logits, position: int, path: Sequence[int], other: int) -> float:
        """Return how much rounding would have to move for the choice to become another token.

        If the cut-offs leave both tokens, that is the gap of their scores, or the choice's distance to a cut-off if
        that is smaller; else the distance of `other` to the cut-offs that exclude it.

        Args:
            logits: The node's logits, `float32[V]`.
            position: Absolute position of the node, in tokens.
            path: The drafted tokens from below the root down to the node.
            other: The other token.
        """
        chosen, processed = self.choose(logits, position, path), self.processed(logits, path)
        if chosen == other:
            return 0.0
        scores = processed + self.noise(position).all if self.params.temperature > 0 else processed
        gap = float(scores[chosen] - scores[other])
        if not self._cuts:
            return gap
        cut_offs = self._cut_offs(self._row(logits, path))
        inside = cut_offs.slacks(other)
        return min([gap, *cut_offs.slacks(chosen)]) if min(inside) >= 0 else -min(inside)
