"""`Sequence`: one sequence in flight, with its tokens, slot, parameters and metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.errors import ExecutionError, SpecbuildError, message_of
from specbuild.runtime.sampling.logprobs import TokenLogprobs
from specbuild.runtime.sampling.sampler import Sampler, SamplingParams
from specbuild.runtime.speculation.controller import SequenceController
from specbuild.runtime.speculation.draft_limits import Limits
from specbuild.runtime.speculation.tree import TreeSpec

from .detokenizer import Detokenizer
from .metrics import RequestMetrics

_CHARACTERS = (1 << 20) - 1


def string_of(tokens: Iterable[int]) -> str:
    """Return a text with a character for each token: Python searches strings fastest. Ids past 2²⁰ become others."""
    return "".join([chr(token & _CHARACTERS) for token in tokens])


@dataclass(slots=True)
class Sequence:
    """One sample of a request while it runs. `tokens` is prompt and output; its last one is the next round's root."""

    index: int  # which prompt, from 0
    tokens: list[int]
    params: SamplingParams
    sampler: Sampler
    tree: TreeSpec | None  # None: plain decoding
    detokenizer: Detokenizer
    metrics: RequestMetrics
    limit: int  # maximum tokens, prompt and output together
    controller: SequenceController | None = None  # decides what each round drafts; None: always the same tree
    sample: int = 0  # which of the prompt's samples, from 0
    deadline: float = math.inf  # when to end it, in seconds on the scheduler's clock
    slot: int = -1  # -1: none yet
    cached: int = 0  # tokens whose rows are committed in the target's cache
    output: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)  # one per output token: whether a drafter had proposed it
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per output token, if asked for
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it; None: something else did
    error: SpecbuildError | None = None
    shape: TreeSpec | None = field(init=False)  # the tree within the round's limits; None: no draft
    room: int = 1 << 16  # maximum draft nodes in this round
    _ids: NDArray[np.int64] = field(init=False)
    _string: str = ""

    def __post_init__(self) -> None:
        self.shape = self.tree
        self._ids = np.empty(max(self.limit, len(self.tokens)), dtype=np.int64)
        self._ids[: len(self.tokens)] = self.tokens

    @property
    def history(self) -> NDArray[np.int64]:
        """`tokens` as `int64[len(tokens)]`; a view, not a copy."""
        return self._ids[: len(self.tokens)]

    @property
    def string(self) -> str:
        """`tokens` as `string_of` gives them; made as far as it is asked for."""
        if missing := self.tokens[len(self._string) :]:
            self._string += string_of(missing)
        return self._string

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
        return self.tree is not None and len(self.tokens) + 1 < self.limit and self.decodes

    @property
    def needs_host(self) -> bool:
        """Return whether a host has to see each of its rounds: for a constraint's mask or for log-probabilities."""
        return self.sampler.matcher is not None or self.params.logprobs is not None

    def submit(self, now: float) -> None:
        """Note when the caller handed it over and start its deadline; `now`: seconds on the scheduler's clock."""
        self.metrics.submitted = now
        if self.params.deadline is not None:
            self.deadline = now + self.params.deadline

    def limit_tree(self, limits: Limits, batch: int, max_nodes: int = 1 << 16) -> None:
        """Set `room`, and `shape`, the tree of this round; None if nothing may be drafted.

        Args:
            limits: The operator's limits.
            batch: Number of sequences that draft in the round, this one included.
            max_nodes: Maximum nodes of its part of a step, root included.
        """
        self.room = limits.max_nodes(batch, min(max_nodes - 1, self.limit - len(self.tokens) - 1))
        self.shape = self.tree and self.tree.within(limits.max_nodes(batch, min(max_nodes - 1, self.tree.nodes)))

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
        self._ids[len(self.tokens)] = token
        self.tokens.append(token)
        self.output.append(token)
        self.sampler.emit(token, len(self.tokens) - 1)
        ended = token in eos and not self.params.ignore_eos
        if not ended and token in self.params.stop_token_ids:
            ended, self.stop_reason = True, token
        if ended:  # its token is not part of the text
            self.finish_reason = "stop"
        elif self.detokenizer.push(token):
            self.finish_reason, self.stop_reason = "stop", self.detokenizer.stop_reason
        elif len(self.tokens) >= self.limit:
            self.finish_reason = "length"

    def fail(self, error: BaseException) -> None:
        """End the sequence with an error; any other than a SpecbuildError is wrapped in an ExecutionError."""
        if not isinstance(error, SpecbuildError):
            cause = error
            error = ExecutionError(f"decoding failed, {type(cause).__name__}: {message_of(cause)}")
            error.__cause__ = cause
        self.error, self.finish_reason = error, "error"
