"""`Loop`, which an engine drives: what the host loop and the device loop are both made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.backends.exactness import ExactnessClass
from specbuild.runtime.backends.executor import Executor
from specbuild.runtime.drafting.proposer import Proposer
from specbuild.runtime.requests.metrics import RunStats
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.cost_model import CostModel
from specbuild.runtime.speculation.draft_limits import NO_LIMITS, Limits

from .admission import Admission
from .planner import Planner
from .reading import Reader


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """Options of a decoding loop.

    Attributes:
        limits: Limits on what rounds may draft, whatever requests ask for.
        prefix_caching: Whether a new sequence reuses the cached rows of a text with the same prefix.
        lone_chunk: Prefill chunk when only one sequence runs; None: the same as otherwise.
        exactness: The class that the target's steps are padded to; None: there is none.
        step_nodes: Maximum nodes of all sequences in a step; None: no limit.
        cost: What rounds cost, which records what steps take; None: the bundle was never tuned.
    """

    limits: Limits = NO_LIMITS
    prefix_caching: bool = True
    lone_chunk: int | None = None
    exactness: ExactnessClass | None = None
    step_nodes: int | None = None
    cost: CostModel | None = None


DEFAULTS = LoopOptions()


class Loop(ABC):
    """Decodes sequences in slots, a round at a time; used by one thread at a time.

    Attributes:
        target: The target's executor.
        proposer: What proposes the trees.
        emission: What emits tokens.
        planner: What limits the drafts; its limits may change between rounds.
        reader: What prefills.
        admission: What assigns slots.
        exactness: If set, a seed gives one text, whatever is drafted or runs beside it.
        cost: What rounds cost; None: the bundle was never tuned.
        tally: Counts and times of all rounds so far.
    """

    trunk = False  # whether nothing is accepted beyond a tree's first side branch

    def __init__(
        self,
        target: Executor,
        proposer: Proposer,
        reader: Reader,
        admission: Admission,
        max_nodes: int,
        options: LoopOptions,
    ) -> None:
        """`max_nodes`: a sequence's maximum nodes in a step; for the others see `Loop` and `LoopOptions`."""
        self.target, self.proposer, self.reader, self.admission = target, proposer, reader, admission
        self.emission, self.planner, self.tally = reader.emission, Planner(options.limits, max_nodes), RunStats()
        self.exactness, self.cost = options.exactness, options.cost

    @abstractmethod
    def round(self, sequences: Seq[Sequence]) -> None:
        """Run one round: each sequence emits at least one token, prefills a chunk of its prompt, or fails alone.

        Raises what drafting or the step itself raises, which concerns all sequences.
        """

    def sibling(self, looks_up: bool = True) -> Self:
        """Return another loop over the same models, for measuring; only one of them may have sequences at a time.

        Args:
            looks_up: Whether it drafts continuations from the text itself.
        """
        other = copy(self)
        other.proposer, other.tally = Proposer(self.proposer.model, looks_up), RunStats()
        return other

    def close(self) -> None:
        """Free the models and the caches."""
        for executor in filter(None, (self.target, self.draft_executor)):
            executor.close()

    @property
    def stats(self) -> RunStats:
        """A copy of the counts and times of all rounds so far."""
        return copy(self.tally)

    @property
    def draft_executor(self) -> Executor | None:
        """The draft's executor; None if no model drafts."""
        return self.proposer.model.executor if self.proposer.model else None

    @property
    def notes(self) -> list[str]:
        """Lines that say what does not run as intended, and why."""
        return []

    @property
    def cache_bytes(self) -> int:
        """Bytes of the target's and the draft's caches."""
        return sum(executor.cache_bytes for executor in (self.target, self.draft_executor) if executor)

    def check(self, sequence: Sequence) -> None:
        """Raise OptionError for a sequence that asks for a larger tree than is allowed, or could never get a slot."""
        self.planner.check(sequence)
        self.admission.check(sequence)

    def release(self, slot: int) -> None:
        """Mark a slot's sequence as ended; its rows stay for a later text with the same prefix."""
        self.admission.release(slot)

    def logits(self, tokens: list[int], count: int = 1, nodes: int | None = None) -> NDArray[np.float32]:
        """Return the target's logits after each of the last `count` tokens of a text, `float32[count, V]`.

        The text is prefilled into slot 0, which must be free, at most `nodes` tokens a step; see `Reader`.
        """
        with self.borrowed(len(tokens)):
            return self.reader.logits(tokens, count, nodes or self.reader.chunk)

    @contextmanager
    def borrowed(self, tokens: int) -> Iterator[None]:
        """Reserve slot 0, which must be free, for `tokens` tokens of a text that is no sequence's, while inside."""
        self.admission.borrow(0, tokens)
        try:
            yield
        finally:
            self.release(0)
