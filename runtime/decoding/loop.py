"""What an engine drives: the seam between it and the loops, and what both of them hold."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import current_thread, main_thread
from typing import NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.backends.exactness import ExactnessClass
from specbuild.runtime.backends.executor import Executor
from specbuild.runtime.drafting.model import ModelDrafter
from specbuild.runtime.requests.metrics import RunStats, Tally
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.draft_limits import NO_LIMITS, Limits
from specbuild.runtime.speculation.live import LiveTimings

from .planner import Planner


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """How a loop decodes.

    limits: what rounds may draft, whatever requests ask for. prefix_caching: what a slot's cache holds of a text is
    there for the next one that begins the same. lone_chunk: tokens of a prompt in a step where nobody else waits for
    its end; None: as many as otherwise. exactness: the class that the target's steps are filled up to, None: it has
    none. bound: how much farther apart two logits may lie outside of it; a device accepts nothing that is.
    sequence_nodes: of a sequence that drafts in a step, what is computed again included; None: what the target takes.
    step_nodes: of all sequences in a step; None: no limit. live: is told what rounds take; None: nobody is.
    """

    limits: Limits = NO_LIMITS
    prefix_caching: bool = True
    lone_chunk: int | None = None
    exactness: ExactnessClass | None = None
    bound: float = 0.0
    sequence_nodes: int | None = None
    step_nodes: int | None = None
    live: LiveTimings | None = None


DEFAULTS = LoopOptions()


class Loop(Protocol):
    """Decodes sequences in slots, a round at a time; from one thread at a time."""

    page_tokens: int | None  # that all pages of the caches hold together; None where each slot has rows of its own
    exactness: ExactnessClass | None  # with one a seed gives one text, whatever is drafted and what else runs
    planner: Planner  # who drafts, within limits that may change between rounds
    bound: float  # logits that a choice in a side branch must be apart to be made there; 0: all are made

    @property
    def stats(self) -> RunStats:
        """Where the time of all rounds went until now; a copy."""
        ...

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

    def cached_texts(self) -> list[tuple[str | None, list[int]]]:
        """The `cache_salt` and the tokens of each text that a slot's cache holds; from any thread."""
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


class CountingLoop(Loop, Protocol):
    """A loop as `accounted` sees it."""

    tally: Tally
    live: LiveTimings | None


def cache_bytes(loop: Loop) -> int:
    """See `Loop.cache_bytes`."""
    return sum(executor.cache_bytes for executor in (loop.target, loop.draft_executor) if executor)


def step_rows(loop: CountingLoop, nodes: int) -> int:
    """Rows of a step of so many nodes, with what fills it up."""
    return loop.exactness.filled(nodes) if loop.exactness else nodes


class _State(NamedTuple):
    """How far a sequence is: whether it decodes, its tokens, those of its prompt that it read, and its drafts."""

    decodes: bool
    emitted: int
    read: int
    drafts: int
    drafted: int

    @classmethod
    def of(cls, sequence: Sequence) -> _State:
        """As it is now."""
        stats, metrics = sequence.metrics.speculative_decoding, sequence.metrics
        drafted = stats.num_draft_tokens + stats.num_recomputed_tokens
        read = sequence.cached - metrics.num_cached_tokens
        return cls(sequence.decodes, len(sequence.output), read, stats.num_spec_steps, drafted)

    def after(self, was: _State) -> tuple[_State, _State]:
        """Both states; who drafted did decode, though it may have entered in this round, its prompt in a cache."""
        return was._replace(decodes=True) if self.drafts > was.drafts else was, self

    def rows_since(self, was: _State) -> int:
        """Its rows of a round's step: of its prompt, or the last token, what it drafted and what was computed again."""
        return 1 + self.drafted - was.drafted if was.decodes else max(self.read - was.read, 1)


class accounted:  # noqa: N801  (it reads as a word, and costs less than a generator in every round)
    """Add a round to a loop's statistics and its sequences' metrics, and tell its live timings.

    One that raises is not counted. `decoded`: rows that trees added to a step in which all decode; None: it was no such
    step.
    """

    __slots__ = ("_before", "_likely", "_loop", "_sequences", "_were", "decoded")

    def __init__(self, loop: CountingLoop, sequences: Seq[Sequence]) -> None:
        self._loop, self._sequences = loop, sequences
        self.decoded: int | None = None

    def __enter__(self) -> Self:
        self._before, self._were = _clock(self._loop), [_State.of(s) for s in self._sequences]
        live = self._loop.live
        self._likely = (live.took, live.likely) if live else (0.0, 0.0)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            tally, (now, draft, verify), before = self._loop.tally, _clock(self._loop), self._before
            total, draft, verify = now - before[0], draft - before[1], verify - before[2]
            tally.rounds += 1
            tally.emitted += sum(
                len(s.output) - was.emitted for s, was in zip(self._sequences, self._were, strict=True)
            )
            tally.total += total
            tally.draft += draft
            tally.verify += verify
            if live := self._loop.live:
                self._tell(live, total - draft - verify)
                tally.told, tally.timed = live.said, live.took
            self._share(total)

    def _share(self, total: float) -> None:
        """Each sequence's part of the round's seconds by its rows, and what plain decoding would have had for it.

        A round that drafted nothing takes what plain decoding does, and so does reading a prompt. Where others read,
        one row of a sequence is a token of plain decoding; its other tokens would have been rounds of their own.
        """
        done = [(s.metrics, *_State.of(s).after(was)) for s, was in zip(self._sequences, self._were, strict=True)]
        rows = [now.rows_since(was) for _, was, now in done]
        second, drafted = total / max(sum(rows), 1), any(now.drafts > was.drafts for _, was, now in done)
        decoding = sum(was.decodes for _, was, _ in done)
        token = self._plain(decoding) if drafted else 0.0
        for own, (metrics, was, now) in zip(rows, done, strict=True):
            metrics.busy_time += second * own
            if not (drafted and was.decodes):
                metrics.plain_time += second * own
            elif decoding < len(done):
                metrics.plain_time += second + max(now.emitted - was.emitted - 1, 0) * token
            else:
                metrics.plain_time += (now.emitted - was.emitted) * token

    def _plain(self, decoding: int) -> float:
        """Seconds of a token of each of so many where none drafts; NaN where no table says so.

        What the round took over what such rounds take, because others needed the machine, plain decoding had taken too.
        """
        live, target = self._loop.live, self._loop.target
        if live is None:
            return math.nan
        shaped = target.batch_size * target.buckets[0] if target.buckets else 0
        rows = shaped or step_rows(self._loop, decoding)
        took, likely = live.took - self._likely[0], live.likely - self._likely[1]
        plain = live.plain(rows, decoding, max(s.params.temperature for s in self._sequences))
        return plain / decoding * (took / likely if likely > 0 else 1.0)

    def _tell(self, live: LiveTimings, own: float) -> None:
        if self.decoded is None:
            live.skip()
        else:
            sampled = any(s.params.temperature > 0 for s in self._sequences)
            grown = sum(s.policy is None or s.policy.now.levels > 0 for s in self._sequences)
            live.round(own, len(self._sequences), self.decoded, sampled, max(grown, 1))


class alone:  # noqa: N801
    """Let what is raised inside end this sequence, while the others go on; an interrupt ends all of them.

    Interrupts reach the main thread alone: elsewhere such an error is what a tokenizer or a constraint raised.
    """

    __slots__ = ("_sequence",)

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is None:
            return False
        if isinstance(error, KeyboardInterrupt | SystemExit) and current_thread() is main_thread():
            return False
        self._sequence.fail(error)  # a tokenizer's panic is no Exception
        return True


def _clock(loop: CountingLoop) -> tuple[float, float, float]:
    """Seconds: now, and spent so far in the draft and in the target."""
    draft = loop.draft_executor
    return time.perf_counter(), draft.seconds if draft else 0.0, loop.target.seconds
