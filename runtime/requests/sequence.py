"""`Sequence`: one sequence in flight, with its tokens, slot, parameters and metrics."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from specbuild.runtime.errors import ExecutionError, SpecbuildError, message_of
from specbuild.runtime.sampling.logprobs import TokenLogprobs
from specbuild.runtime.sampling.sampler import Sampler, SamplingParams
from specbuild.runtime.speculation.controller import SequenceController
from specbuild.runtime.speculation.tree import TreeSpec

from .detokenizer import Detokenizer
from .metrics import RequestMetrics
from .text import Text


@dataclass(frozen=True, slots=True)
class Request:
    """One sample of a request, as it was asked for.

    Attributes:
        params: The sampling parameters.
        tree: The largest tree that a round may draft; None: plain decoding.
        max_tokens: Maximum tokens, prompt and output together.
        index: The prompt's place in its call, from 0.
        sample: The sample's place among those of its prompt, from 0.
    """

    params: SamplingParams
    tree: TreeSpec | None
    max_tokens: int
    index: int = 0
    sample: int = 0


@dataclass(frozen=True, slots=True)
class DraftBudget:
    """A sequence's limits in a round: `nodes` nodes of a continuation, or a tree within `shape`."""

    nodes: int
    shape: TreeSpec


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a text ended; `stop`: the stop string or stop token that ended it, if one did; `error`: what it failed of."""

    reason: str
    stop: str | int | None = None
    error: SpecbuildError | None = None


@dataclass(slots=True)
class Sequence:
    """One sample of a request while it runs; the last token of its text is the next round's root."""

    request: Request
    text: Text
    sampler: Sampler
    detokenizer: Detokenizer
    metrics: RequestMetrics
    controller: SequenceController | None = None  # decides what each round drafts; None: always the same tree
    slot: int = -1  # -1: none yet
    cached: int = 0  # tokens whose rows are committed in the target's cache
    budget: DraftBudget | None = field(init=False)  # of the next round; None: no draft
    output: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)  # one per output token: whether a drafter had proposed it
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per output token, if asked for
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)  # one per token read, None for the first
    ending: Ending | None = None

    def __post_init__(self) -> None:
        tree = self.request.tree
        self.budget = DraftBudget(1 << 16, tree) if tree else None

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters."""
        return self.request.params

    @property
    def tokens(self) -> list[int]:
        """The text's tokens, to be read only."""
        return self.text.tokens

    @property
    def finish_reason(self) -> str | None:
        """Why the text ended; None: it goes on."""
        return self.ending.reason if self.ending else None

    @property
    def error(self) -> SpecbuildError | None:
        """The error that ended the text; None: no error did."""
        return self.ending.error if self.ending else None

    @property
    def shape(self) -> TreeSpec | None:
        """The largest tree of the next round; None: no draft."""
        return self.budget.shape if self.budget else None

    @property
    def deadline(self) -> float:
        """When to end it, in seconds on the scheduler's clock; infinite before it is submitted."""
        seconds, submitted = self.params.deadline, self.metrics.submitted
        return math.inf if seconds is None or submitted is None else submitted + seconds

    @property
    def pending(self) -> int:
        """Number of tokens that are not in the target's cache yet, the last one included; 1 after prefill."""
        return len(self.tokens) - self.cached

    @property
    def decodes(self) -> bool:
        """Return whether prefill is done: only the last prompt token, whose logits are wanted, may still be missing."""
        return bool(self.output) or self.pending == 1

    @property
    def drafts(self) -> bool:
        """Return whether the next round should draft: not during prefill, and not if only one more token fits."""
        return self.request.tree is not None and len(self.tokens) + 1 < self.request.max_tokens and self.decodes

    @property
    def needs_host(self) -> bool:
        """Return whether a host has to see each of its rounds: for a constraint's mask or for log-probabilities."""
        return self.sampler.matcher is not None or self.params.logprobs is not None

    def submit(self, now: float) -> None:
        """Note when the caller handed it over; `now`: seconds on the scheduler's clock."""
        self.metrics.submitted = now

    def enter(self, rows: int) -> None:
        """Note that a slot's cache holds the first `rows` tokens of its text already."""
        self.cached = self.metrics.num_cached_tokens = rows

    def cache(self, rows: int) -> None:
        """Note that the rows of its first `rows` tokens are committed."""
        self.cached = rows

    def set_budget(self, budget: DraftBudget | None) -> None:
        """Set the budget of the next round; None: it drafts nothing."""
        self.budget = budget

    def emit(self, token: int, eos: frozenset[int], begins: bool = True) -> None:
        """Append a token; set `finish_reason` if it ends the text.

        Args:
            token: The target's choice.
            eos: The model's end-of-sequence token ids.
            begins: Whether it is its round's first token. Each later one shows that the token before it was drafted.
        """
        if not begins:
            self.drafted[-1] = True
        self.drafted.append(False)
        self.text.append(token)
        if prediction := self.text.prediction:
            self.metrics.speculative_decoding.num_accepted_prediction_tokens = prediction.foretold
        self.output.append(token)
        self.sampler.emit(token, len(self.tokens) - 1)
        if token in eos and not self.params.ignore_eos:  # its token is not part of the text, nor a stop token's
            self.end("stop")
        elif token in self.params.stop_token_ids:
            self.end("stop", token)
        elif self.detokenizer.push(token):
            self.end("stop", self.detokenizer.stop_reason)
        elif len(self.tokens) >= self.request.max_tokens:
            self.end("length")

    def end(self, reason: str, stop: str | int | None = None) -> None:
        """End the text, unless it has ended; see `Ending`."""
        self.ending = self.ending or Ending(reason, stop)

    def fail(self, error: BaseException) -> None:
        """End the sequence with an error; any other than a SpecbuildError is wrapped in an ExecutionError."""
        if not isinstance(error, SpecbuildError):
            cause = error
            error = ExecutionError(f"decoding failed, {type(cause).__name__}: {message_of(cause)}")
            error.__cause__ = cause
        self.ending = Ending("error", error=error)
