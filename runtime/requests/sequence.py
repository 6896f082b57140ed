"""One sequence in flight: its tokens, its slot, its parameters, and what is measured of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.errors import ExecutionError, SpecbuildError, message_of
from specbuild.runtime.sampling.logprobs import TokenLogprobs
from specbuild.runtime.sampling.sampler import Sampler, SamplingParams
from specbuild.runtime.speculation.draft_limits import Limits
from specbuild.runtime.speculation.policy import SequencePolicy
from specbuild.runtime.speculation.tree import TreeSpec

from .detokenizer import Detokenizer
from .metrics import RequestMetrics


@dataclass(slots=True)
class Sequence:
    """A request while it runs. `tokens` is prompt and output; the last one is the next round's root."""

    index: int  # which prompt
    tokens: list[int]
    params: SamplingParams
    sampler: Sampler
    tree: TreeSpec | None  # None: plain decoding
    detokenizer: Detokenizer
    metrics: RequestMetrics
    limit: int  # most tokens in all, prompt included
    policy: SequencePolicy | None = None  # what chooses each round's tree; None: the same tree always
    sample: int = 0  # which of the prompt's samples
    deadline: float = math.inf  # when to end it, on the scheduler's clock
    slot: int = -1
    cached: int = 0  # tokens whose rows the target has committed
    output: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)  # of the output: whether a drafter had proposed the token
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the output, where asked for
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string or token id that ended it; None: something else did
    error: SpecbuildError | None = None
    shape: TreeSpec | None = field(init=False)  # the tree, no larger than the round's limits
    room: int = 1 << 16  # nodes that its part of a step has room for
    _ids: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.shape = self.tree
        self._ids = np.empty(max(self.limit, len(self.tokens)), dtype=np.int64)
        self._ids[: len(self.tokens)] = self.tokens

    @property
    def history(self) -> NDArray[np.int64]:
        """`tokens` as an array; not a copy."""
        return self._ids[: len(self.tokens)]

    @property
    def pending(self) -> int:
        """Tokens the next step reads, or the next ones of a long prompt: the last one, and those whose rows are not in.

        Once the prompt is in, more than one where a side branch was accepted (see `HostLoop.accept`).
        """
        return len(self.tokens) - self.cached

    @property
    def decodes(self) -> bool:
        """Whether the prompt is in, but for the token whose logits are wanted."""
        return self.pending == 1 or bool(self.output)

    @property
    def drafts(self) -> bool:
        """Whether the next round should draft: not while the prompt is read, not for the last token."""
        return self.tree is not None and self.decodes and len(self.tokens) + 1 < self.limit

    def submit(self, now: float) -> None:
        """Its caller hands it over, from when its deadline counts; `now`: on the scheduler's clock."""
        self.metrics.submitted = now
        if self.params.deadline is not None:
            self.deadline = now + self.params.deadline

    def limit_tree(self, limits: Limits, batch: int, max_nodes: int = 1 << 16) -> None:
        """Set the round's `shape`, beside `batch − 1` others that draft; None where nothing may be drafted.

        `max_nodes`: of its part of a step, what is read again included.
        """
        self.room = max_nodes - self.pending
        if self.policy:
            self.policy.limits = limits
        self.shape = self.tree and self.tree.within(limits.max_nodes(batch, min(self.room, self.tree.nodes)))

    def emit(self, token: int, eos: frozenset[int], begins: bool = True) -> None:
        """Append a token; set `finish_reason` where the text ends with it.

        Args:
            token: The target's choice.
            eos: Tokens that end a text.
            begins: Whether it is its round's first token. Each later one shows that the token before it had been drafted.
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
        if ended:  # its token is no text
            self.finish_reason = "stop"
        elif self.detokenizer.push(token):
            self.finish_reason, self.stop_reason = "stop", self.detokenizer.stop_reason
        elif len(self.tokens) >= self.limit:
            self.finish_reason = "length"

    def fail(self, error: BaseException) -> None:
        """End the sequence with an error; what was not raised on purpose becomes an ExecutionError."""
        if not isinstance(error, SpecbuildError):
            cause = error
            error = ExecutionError(f"decoding failed, {type(cause).__name__}: {message_of(cause)}")
            error.__cause__ = cause
        self.error, self.finish_reason = error, "error"
