"""What an engine drives: the seam between it and the loops, and what both of them hold."""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.backends import nvtx
from specbuild.runtime.backends.executor import Executor
from specbuild.runtime.drafting.model import ModelDrafter
from specbuild.runtime.requests.metrics import RunStats
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.draft_limits import NO_LIMITS, Limits


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """How a loop decodes.

    limits: what rounds may draft, whatever requests ask for. prefix_caching: what a slot's cache holds of a text is
    there for the next one that begins the same. lone_chunk: tokens of a prompt in a step where nobody else waits for
    its end; None: as many as otherwise.
    """

    limits: Limits = NO_LIMITS
    prefix_caching: bool = True
    lone_chunk: int | None = None


DEFAULTS = LoopOptions()


class Loop(Protocol):
    """Decodes sequences in slots, a round at a time; from one thread at a time."""

    stats: RunStats
    page_tokens: int | None  # that all pages of the caches hold together; None where each slot has rows of its own

    @property
    def target(self) -> Executor:
        """The model that decides."""
        ...

    @property
    def draft_executor(self) -> Executor | None:
        """The draft model; None where none drafts."""
        ...

    def round(self, sequences: Seq[Sequence]) -> None:
        """One round for every sequence: each emits at least one token, reads a chunk of its prompt, or fails alone.

        Raises whatever drafting or the step itself raises, which concerns them all.
        """
        ...

    def check(self, sequence: Sequence) -> None:
        """Raises OptionError for a sequence that asks for a larger tree than is allowed, or would never get a slot."""
        ...

    def pick(self, sequence: Sequence, free: Seq[int]) -> int | None:
        """The best of the free slots for a sequence; None: it has to wait until others have ended."""
        ...

    def release(self, slot: int) -> None:
        """The sequence in a slot has ended; its rows stay, for a text that begins the same."""
        ...

    def cached_tokens(self) -> tuple[int, ...]:
        """By slot, tokens of its cache that a text which begins the same need not read again; from any thread."""
        ...

    def logits(self, tokens: list[int], count: int = 1, nodes: int | None = None) -> NDArray[np.float32]:
        """The target's logits after each of the last `count` tokens of a text, `float32[count, V]`.

        Read into slot 0, which must be free, at most `nodes` a step.
        """
        ...

    def borrowed(self, tokens: int) -> AbstractContextManager[None]:
        """While inside, slot 0, which must be free, is for a text of so many tokens that is no sequence's."""
        ...

    def sibling(self, looks_up: bool = True, overlap: bool = False) -> Loop:
        """Another loop over the same models, for measuring; only one of them may have sequences at a time.

        looks_up: whether it continues texts from themselves; overlap: it drafts on while the target verifies.
        """
        ...

    def fresh_drafter(self, overlap: bool = False) -> ModelDrafter | None:
        """The draft model as the host drives it, that knows of no text yet; None where none drafts."""
        ...

    @property
    def notes(self) -> list[str]:
        """What runs otherwise than it should, and why."""
        ...

    @property
    def cache_bytes(self) -> int:
        """Bytes of both caches."""
        ...

    def close(self) -> None:
        """Free the models and the caches."""
        ...


def cache_bytes(loop: Loop) -> int:
    """See `Loop.cache_bytes`."""
    return sum(executor.cache_bytes for executor in (loop.target, loop.draft_executor) if executor)


@contextmanager
def accounted(loop: Loop, sequences: Seq[Sequence]) -> Iterator[None]:
    """Add a round to a loop's statistics."""
    before, emitted = _clock(loop), sum(len(s.output) for s in sequences)
    with nvtx.range("round"):
        yield
    total, draft, verify = (now - then for now, then in zip(_clock(loop), before, strict=True))
    emitted = sum(len(s.output) for s in sequences) - emitted
    loop.stats = loop.stats.plus(rounds=1, emitted=emitted, total=total, draft=draft, verify=verify)


@contextmanager
def alone(sequence: Sequence) -> Iterator[None]:
    """Let what is raised inside end this sequence, while the others go on; an interrupt ends all of them."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a tokenizer's panic is no Exception
        sequence.fail(error)


def _clock(loop: Loop) -> tuple[float, float, float]:
    """Seconds: now, and spent so far in the draft and in the target."""
    draft = loop.draft_executor
    return time.perf_counter(), draft.seconds if draft else 0.0, loop.target.seconds
