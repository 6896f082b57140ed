"""The `Loop` protocol that an engine drives, and what the host loop and the device loop share."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import current_thread, main_thread
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.backends.exactness import ExactnessClass
from specbuild.runtime.backends.executor import Executor
from specbuild.runtime.drafting.model import ModelDrafter
from specbuild.runtime.requests.metrics import RunStats
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.cost_model import CostModel
from specbuild.runtime.speculation.draft_limits import NO_LIMITS, Limits

from .planner import Planner


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """Options of a decoding loop.

    Attributes:
        limits: Limits on what rounds may draft, whatever requests ask for.
        prefix_caching: Whether a new sequence reuses the cached rows of a text with the same prefix.
        lone_chunk: Prefill chunk when only one sequence runs; None: the same as otherwise.
        exactness: The class that the target's steps are padded to; None: there is none.
        sequence_nodes: Maximum nodes of a drafting sequence in a step; None: the target's maximum.
        step_nodes: Maximum nodes of all sequences in a step; None: no limit.
        cost: What rounds cost, which records what steps take; None: the bundle was never tuned.
    """

    limits: Limits = NO_LIMITS
    prefix_caching: bool = True
    lone_chunk: int | None = None
    exactness: ExactnessClass | None = None
    sequence_nodes: int | None = None
    step_nodes: int | None = None
    cost: CostModel | None = None


DEFAULTS = LoopOptions()


class Loop(Protocol):
    """Decodes sequences in slots, a round at a time; used by one thread at a time."""

    page_tokens: int | None  # tokens that all pages hold together; None: each slot has rows of its own
    exactness: ExactnessClass | None  # if set, a seed gives one text, whatever is drafted or runs beside it
    planner: Planner  # decides which sequences draft; its limits may change between rounds
    trunk: bool  # whether nothing is accepted beyond a tree's first side branch

    @property
    def stats(self) -> RunStats:
        """A copy of the counts and times of all rounds so far."""
        ...

    @property
    def target(self) -> Executor:
        """The target's executor."""
        ...

    @property
    def draft_executor(self) -> Executor | None:
        """The draft's executor; None if no model drafts."""
        ...

    def round(self, sequences: Seq[Sequence]) -> None:
        """Run one round: each sequence emits at least one token, prefills a chunk of its prompt, or fails alone.

        Raises what drafting or the step itself raises, which concerns all sequences.
        """
        ...

    def check(self, sequence: Sequence) -> None:
        """Raise OptionError for a sequence that asks for a larger tree than is allowed, or could never get a slot."""
        ...

    def pick(self, sequence: Sequence, free: Seq[int]) -> int | None:
        """Return the best free slot for a sequence; None: it has to wait until others have ended."""
        ...

    def release(self, slot: int) -> None:
        """Mark a slot's sequence as ended; its rows stay for a later text with the same prefix."""
        ...

    def cached_tokens(self) -> tuple[int, ...]:
        """Return, by slot, how many cached tokens a text with the same prefix skips in prefill; from any thread."""
        ...

    def cached_texts(self) -> list[tuple[str | None, list[int]]]:
        """Return the `cache_salt` and tokens of each text in the slots' caches; any thread may call this."""
        ...

    def logits(self, tokens: list[int], count: int = 1, nodes: int | None = None) -> NDArray[np.float32]:
        """Return the target's logits after each of the last `count` tokens of a text, `float32[count, V]`.

        The text is prefilled into slot 0, which must be free, at most `nodes` tokens a step.
        """
        ...

    def borrowed(self, tokens: int) -> AbstractContextManager[None]:
        """Reserve slot 0, which must be free, for `tokens` tokens of a text that is no sequence's, while inside."""
        ...

    def sibling(self, looks_up: bool = True) -> Loop:
        """Return another loop over the same models, for measuring; only one of them may have sequences at a time.

        Args:
            looks_up: Whether it drafts continuations from the text itself.
        """
        ...

    def fresh_drafter(self) -> ModelDrafter | None:
        """Return a host drafter of the same draft model that has seen no text yet; None if no model drafts."""
        ...

    @property
    def notes(self) -> list[str]:
        """Lines that say what does not run as intended, and why."""
        ...

    @property
    def cache_bytes(self) -> int:
        """Bytes of the target's and the draft's caches."""
        ...

    def close(self) -> None:
        """Free the models and the caches."""
        ...


def cache_bytes(loop: Loop) -> int:
    """See `Loop.cache_bytes`."""
    return sum(executor.cache_bytes for executor in (loop.target, loop.draft_executor) if executor)


class alone(AbstractContextManager[None]):  # noqa: N801
    """Lets an error raised inside end only this sequence; an interrupt ends all of them.

    Only the main thread receives interrupts: in another thread such an error came from a tokenizer or a constraint.
    """

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is None:
            return False
        if isinstance(error, KeyboardInterrupt | SystemExit) and current_thread() is main_thread():
            return False
        self._sequence.fail(error)  # every BaseException: a tokenizer's panic is no Exception
        return True
