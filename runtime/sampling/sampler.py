"""Sampling parameters, logit processors, and the one choice that target and draft share.

The choice at absolute position t is `argmax_x(f(logits)_x + g(seed, t, x))`: f are the request's processors, which see
the node's own path; g is Gumbel noise, the same for every node at t, in target and draft, and zero at temperature 0.
An argmax over logits plus Gumbel noise is an exact sample of their softmax (Gumbel 1954; Maddison et al. 2014).
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.errors import SHOWN, ExecutionError, OptionError, one_line, shown
from specbuild.runtime.speculation.tree import TreeSpec

from .constraint import Constraint, Matcher, ask, unpack
from .cut_offs import CutOffs

Logits = NDArray[np.float32]
MAX_SAMPLES = 1024  # of one prompt
MAX_LOGPROBS = 20  # tokens reported besides the emitted one, as in OpenAI's API
MAX_SESSION = 256  # characters of a session's name


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is decoded; validated when made, raises OptionError.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off; the penalties are Hugging Face's
    (repetition_penalty: prompt and output, divided or multiplied) and OpenAI's (frequency and presence: output only,
    subtracted); logit_bias maps token ids to what is added. seed None draws fresh entropy, which the result reports.
    speculation is "auto" (the bundle's default tree), "off", or a tree. n: samples of the prompt; sample i is what
    `seed + i` (mod 2⁶⁴) alone gives. logprobs: None, or how many of the best tokens (0…20) to report besides the
    emitted one. deadline: seconds from submission after which the request ends with what it has. session: a name, of at
    most 256 characters; requests of one session share what "auto" learns of their drafts in a tuned bundle. constraint:
    what the texts may be; a token that it does not allow has no score, before the cut-offs.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    speculation: str = "auto"
    n: int = 1
    logprobs: int | None = None
    deadline: float | None = None
    session: str | None = None
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        _integer("max_new_tokens", self.max_new_tokens, 1)
        _integer("top_k", self.top_k, 0)
        _number("temperature", self.temperature, 0, 100)
        if 0 < self.temperature < 0.01:
            raise OptionError(f"temperature {self.temperature} is too small to divide by: use 0 for greedy, or ≥ 0.01")
        _number("top_p", self.top_p, 0, 1, open_low=True)
        _number("min_p", self.min_p, 0, 1)
        _number("repetition_penalty", self.repetition_penalty, 0, 100, open_low=True)
        _number("frequency_penalty", self.frequency_penalty, -100, 100)
        _number("presence_penalty", self.presence_penalty, -100, 100)
        if self.seed is not None:
            _integer("seed", self.seed, 0, 2**64 - 1)
        if not isinstance(self.ignore_eos, bool):
            raise OptionError(f"ignore_eos must be true or false, not {shown(self.ignore_eos)}")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, list | tuple) or not all(isinstance(s, str) and s for s in stop):
            raise OptionError(f"stop must be a string or a list of strings, none of them empty, not {shown(self.stop)}")
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))
        if self.speculation not in ("auto", "off"):
            try:
                TreeSpec.parse(self.speculation)
            except OptionError as error:
                raise OptionError(f'speculation must be "auto", "off" or a tree: {error}') from None
        _integer("n", self.n, 1, MAX_SAMPLES)
        if self.n > 1 and self.temperature == 0:
            raise OptionError(f"n is {self.n} at temperature 0, where all samples are equal: use n 1, or a temperature")
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.deadline is not None:
            _number("deadline", self.deadline, 0, 10**9, open_low=True)
        if self.constraint is not None and not isinstance(self.constraint, Constraint):
            raise OptionError(f"constraint must have a method matcher(vocab_size), not be {shown(self.constraint)}")
        if self.session is not None and (not isinstance(self.session, str) or not 0 < len(self.session) <= MAX_SESSION):
            raise OptionError(f"session must be a string of 1…{MAX_SESSION} characters, not {shown(self.session)}")

    @classmethod
    def names(cls) -> frozenset[str]:
        """The names of all parameters."""
        return frozenset(f.name for f in fields(cls))


def _number(name: str, value: Any, low: float, high: float, open_low: bool = False) -> None:
    bad = isinstance(value, bool) or not isinstance(value, int | float) or value != value
    if bad or not low <= value <= high or (open_low and value == low):
        raise OptionError(
            f"{name} must be a number {'above' if open_low else 'from'} {low} to {high}, not {shown(value)}"
        )


def _integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        limit = f"from {low} to {high}" if high is not None else f"of at least {low}"
        raise OptionError(f"{name} must be a whole number {limit}, not {shown(value)}")


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise OptionError(f"logit_bias must map token ids to numbers, not {shown(value)}")
    bias = {}
    for token, amount in value.items():
        text = shown(token) if isinstance(token, int) else token  # Python prints no number of 5,000 digits
        if isinstance(token, bool) or not isinstance(text, str) or not text.isdecimal() or len(text) >= SHOWN:
            raise OptionError(f"logit_bias has {shown(token)} for a token id: use whole numbers")
        _number("an amount in logit_bias", amount, -1e6, 1e6)
        bias[int(token)] = amount
    return bias


def _matcher(constraint: Constraint, vocab_size: int) -> Matcher:
    """A constraint's matcher; raises OptionError where it makes none."""
    try:
        matcher = constraint.matcher(vocab_size)
    except Exception as error:
        raise OptionError(f"the constraint cannot be used, {type(error).__name__}: {one_line(error)}") from error
    if not callable(getattr(matcher, "mask", None)) or not callable(getattr(matcher, "emit", None)):
        raise OptionError(f"a constraint's matcher must have mask(path) and emit(token), not be {matcher!r:.80}")
    return matcher


def fresh_seed() -> int:
    """53 bits of entropy: a seed that survives JSON in every language."""
    return secrets.randbits(53)


def gumbel(seed: int, position: int, vocab_size: int) -> Logits:
    """g(seed, t, ·): `float32[V]` of standard Gumbel noise; 64-bit word x of Philox(key=[seed, t]) is token x's."""
    words = np.random.Philox(key=np.array([seed, position], dtype=np.uint64)).random_raw(vocab_size)
    uniform = ((words >> np.uint64(12)) + 0.5) * 2.0**-52  # in the open interval (0, 1), exact in float64
    noise: Logits = (-np.log(-np.log(uniform))).astype(np.float32)
    return noise


class Sampler:
    """f and g of one request: turns a node's logits into scores, and scores into the choice."""

    def __init__(self, params: SamplingParams, seed: int, prompt: Sequence[int], vocab_size: int) -> None:
        self.params, self.seed, self.vocab_size = params, seed, vocab_size
        p = params
        if any(token >= vocab_size for token in p.logit_bias):
            raise OptionError(f"logit_bias names a token past the vocabulary of {vocab_size}")
        self._bias_ids = np.fromiter(p.logit_bias.keys(), dtype=np.int64)
        self._bias = np.fromiter(p.logit_bias.values(), dtype=np.float32)
        self._repeats = p.repetition_penalty != 1
        self._counts = p.frequency_penalty != 0 or p.presence_penalty != 0
        self.matcher = _matcher(p.constraint, vocab_size) if p.constraint else None
        self._raised: BaseException | None = None  # by the constraint, while somebody drafted
        self._plain = not (self._repeats or self._counts or self._bias.size or self.matcher)
        self._cuts = p.temperature > 0 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)
        self._seen = np.zeros(vocab_size if self._repeats else 0, dtype=np.bool_)
        if self._repeats:
            self._seen[np.asarray(prompt, dtype=np.int64)] = True
        self._output: Counter[int] = Counter()
        self._noise: dict[int, Logits] = {}

    @property
    def greedy(self) -> bool:
        """True where the scores are the logits themselves."""
        return self._plain and self.params.temperature == 0

    def emit(self, token: int, position: int) -> None:
        """Take note of an emitted token, and forget the noise of positions before `position`."""
        if self._repeats:
            self._seen[token] = True
        if self._counts:
            self._output[token] += 1
        if self.matcher:
            self.matcher.emit(token)
        for past in [t for t in self._noise if t < position]:
            del self._noise[past]

    def noise(self, position: int) -> Logits:
        """g at one position, kept until the text has passed it."""
        if position not in self._noise:
            self._noise[position] = gumbel(self.seed, position, self.vocab_size)
        return self._noise[position]

    def ranked(
        self, logits: Logits, position: int, path: Sequence[int], misses: int | None = None
    ) -> Iterator[tuple[int, float]]:
        """Tokens and their scores f(logits) + g, best first, the lowest id among equals; no token a cut-off excludes.

        `path`: the drafted tokens from below the root down to the node. Ends early after `misses` excluded ones.
        """
        processed = self.processed(logits, path)
        if self.matcher and processed.max() == -np.inf:
            return
        scores = processed + self.noise(position) if self.params.temperature > 0 else processed.copy()
        cut_offs = self._cut_offs(processed) if self._cuts else None
        if cut_offs:
            scores = cut_offs.mask(scores)
        while (score := scores[token := int(scores.argmax())]) > -np.inf:
            if cut_offs is None or cut_offs.in_top_p(token):
                yield token, float(score)
            elif misses is not None:
                misses -= 1
                if misses < 0:
                    return
            scores[token] = -np.inf

    def drafted(self, logits: Logits, position: int, path: Sequence[int], misses: int) -> Iterator[tuple[int, float]]:
        """As `ranked`, for a draft. What the constraint raises ends it; the next choice raises it again."""
        try:
            yield from self.ranked(logits, position, path, misses)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # a library's panic is no Exception
            self._raised = error

    def check(self) -> None:
        """Raise what the constraint raised while somebody drafted."""
        if self._raised:
            raise self._raised

    def choose(self, logits: Logits, position: int, path: Sequence[int]) -> int:
        """The choice at a node: the best token of `ranked`; where no token has a finite score, `argmax`'s.

        Raises ExecutionError where the constraint leaves no such token, and what the constraint raises.
        """
        self.check()
        if self.greedy:
            return int(logits.argmax())
        best = next(self.ranked(logits, position, path), None)
        if best is None and self.matcher:
            raise ExecutionError("no token that the constraint allows has a finite score: let it allow others")
        return best[0] if best else int(logits.argmax())

    def processed(self, logits: Logits, path: Sequence[int]) -> Logits:
        """f before the cut-offs: what the constraint allows, penalties, bias, temperature."""
        if self._plain and self.params.temperature in (0, 1):
            return logits
        p, out = self.params, logits.copy()
        if self.matcher and (mask := ask(self.matcher, path, len(out))) is not None:
            out[~unpack(mask, len(out))] = -np.inf
        if self._repeats:
            seen = self._seen
            if path:
                seen = seen.copy()
                seen[np.asarray(path, dtype=np.int64)] = True
            penalty = np.float32(p.repetition_penalty)
            out[seen] = np.where(out[seen] > 0, out[seen] / penalty, out[seen] * penalty)
        if self._counts:
            counts = self._output + Counter(path)
            ids = np.fromiter(counts.keys(), dtype=np.int64)
            times = np.fromiter(counts.values(), dtype=np.float32)
            out[ids] -= np.float32(p.frequency_penalty) * times + np.float32(p.presence_penalty)
        if self._bias.size:
            out[self._bias_ids] += self._bias
        if p.temperature not in (0, 1):
            out /= np.float32(p.temperature)
        return out

    def _cut_offs(self, processed: Logits) -> CutOffs:
        return CutOffs(processed, self.params.top_k, self.params.top_p, self.params.min_p)

    def margin(self, logits: Logits, position: int, path: Sequence[int], other: int) -> float:
        """How far the choice was from being `other`: what has to move for a rounding to turn one into the other.

        The gap of their scores where both were left in, or the choice's distance to a cut-off if that is less; else
        the distance of `other` to the cut-offs that left it out.
        """
        chosen, processed = self.choose(logits, position, path), self.processed(logits, path)
        if chosen == other:
            return 0.0
        scores = processed + self.noise(position) if self.params.temperature > 0 else processed
        gap = float(scores[chosen] - scores[other])
        if not self._cuts:
            return gap
        cut_offs = self._cut_offs(processed)
        inside = cut_offs.slacks(other)
        return min([gap, *cut_offs.slacks(chosen)]) if min(inside) >= 0 else -min(inside)
