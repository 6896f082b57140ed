"""The `Loop` protocol that an engine drives, and what the host loop and the device loop share."""

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
from specbuild.runtime.requests.metrics import RunStats
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.draft_limits import NO_LIMITS, Limits
from specbuild.runtime.speculation.lead import LEEWAY, gain
from specbuild.runtime.speculation.live import LiveTimings

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
        live: Live timings, which are told what steps and rounds take; None: there are none.
    """

    limits: Limits = NO_LIMITS
    prefix_caching: bool = True
    lone_chunk: int | None = None
    exactness: ExactnessClass | None = None
    sequence_nodes: int | None = None
    step_nodes: int | None = None
    live: LiveTimings | None = None


DEFAULTS = LoopOptions()
LEAST = 1e-6  # seconds that a loop takes for a round


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

    def sibling(self, looks_up: bool = True, overlap: bool = False) -> Loop:
        """Return another loop over the same models, for measuring; only one of them may have sequences at a time.

        Args:
            looks_up: Whether it drafts continuations from the text itself.
            overlap: Whether it goes on drafting while the target verifies.
        """
        ...

    def fresh_drafter(self, overlap: bool = False) -> ModelDrafter | None:
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


class CountingLoop(Loop, Protocol):
    """A loop with the statistics that `accounted` updates."""

    tally: RunStats
    live: LiveTimings | None
    planner: Planner


def cache_bytes(loop: Loop) -> int:
    """See `Loop.cache_bytes`."""
    return sum(executor.cache_bytes for executor in (loop.target, loop.draft_executor) if executor)


def step_rows(loop: CountingLoop, nodes: int) -> int:
    """Return how many rows a step of so many nodes has, padding included."""
    return loop.exactness.filled(nodes) if loop.exactness else nodes


class _State(NamedTuple):
    """A sequence's progress: whether it decodes, tokens emitted and prefilled, drafting rounds, and drafted tokens."""

    decodes: bool
    emitted: int
    read: int
    drafts: int
    drafted: int

    @classmethod
    def of(cls, sequence: Sequence) -> _State:
        """Return a sequence's present state."""
        stats, metrics = sequence.metrics.speculative_decoding, sequence.metrics
        read = sequence.cached - metrics.num_cached_tokens
        return cls(sequence.decodes, len(sequence.output), read, stats.num_spec_steps, stats.num_draft_tokens)

    def after(self, was: _State) -> tuple[_State, _State]:
        """Return both states; one that drafted did decode, even if it entered in this round with a cached prompt."""
        return was._replace(decodes=True) if self.drafts > was.drafts else was, self

    def rows_since(self, was: _State) -> int:
        """Return its rows in a round's step: prompt tokens, or the last token and drafted ones."""
        return 1 + self.drafted - was.drafted if was.decodes else max(self.read - was.read, 1)


class accounted:  # noqa: N801  (lower case reads better after `with`; a generator would cost more in every round)
    """Adds a round to a loop's statistics and its sequences' metrics, and reports it to the live timings.

    A round that raises is not counted. `decoded`: rows that trees added to a step in which all sequences decode; None:
    the step was of another kind. `unseen`: seconds of steps that no executor counts.
    """

    __slots__ = ("_before", "_loop", "_sequences", "_were", "decoded", "unseen")

    def __init__(self, loop: CountingLoop, sequences: Seq[Sequence]) -> None:
        self._loop, self._sequences = loop, sequences
        self.decoded: int | None = None
        self.unseen = 0.0

    def __enter__(self) -> Self:
        self._before, self._were = _clock(self._loop), [_State.of(s) for s in self._sequences]
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            tally, (now, draft, verify), before = self._loop.tally, _clock(self._loop), self._before
            total, draft, verify = now - before[0], draft - before[1], verify - before[2]
            tally.rounds += 1
            pairs = zip(self._sequences, self._were, strict=True)
            tally.emitted += sum(len(s.output) - was.emitted for s, was in pairs)
            tally.total += total
            tally.draft += draft
            tally.verify += verify
            if live := self._loop.live:
                self._tell(live, max(total - draft - verify - self.unseen, LEAST))
            self._share(total)  # which asks the live timings, if anybody decided
            tally.told, tally.timed = (live.said, live.took) if live else (0.0, 0.0)

    def _share(self, total: float) -> None:
        """Divide the round's seconds among the sequences by their rows, and add what plain decoding would have taken.

        A round without drafts, and prefill, take the same in plain decoding. In a round where others prefill, one row
        of a sequence is a plain token, and each further token that it emitted would have been a round of its own.
        """
        done = [(s, *_State.of(s).after(was)) for s, was in zip(self._sequences, self._were, strict=True)]
        rows = [now.rows_since(was) for _, was, now in done]
        drafted = sum(now.drafted - was.drafted for _, was, now in done)
        second, drafts = total / max(sum(rows), 1), any(now.drafts > was.drafts for _, was, now in done)
        decoding, live = sum(was.decodes for _, was, _ in done), self._loop.live
        counts = drafts or self._decided  # then somebody decodes
        plain = self._plain(sum(rows) - drafted, decoding) if counts else 0.0
        token = 0.0
        if drafts:
            token = (plain if decoding == len(done) else self._plain(decoding, decoding)) / decoding
        told = counts and live is not None and live.on
        for own, (sequence, was, now) in zip(rows, done, strict=True):
            metrics, emitted = sequence.metrics, now.emitted - was.emitted
            metrics.busy_time += second * own
            if was.decodes:
                sequence.lead += gain(emitted, total / plain) if told else LEEWAY
            if not (drafts and was.decodes):
                metrics.plain_time += second * own
            elif decoding < len(done):
                metrics.plain_time += second + max(emitted - 1, 0) * token
            else:
                metrics.plain_time += emitted * token

    @property
    def _decided(self) -> bool:
        """Return whether a policy decided in this round. That takes time, whatever is drafted."""
        return any(was.decodes and s.policy and s.shape for s, was in zip(self._sequences, self._were, strict=True))

    def _plain(self, rows: int, decoding: int) -> float:
        """Return the seconds of a round of so many rows without drafts; NaN without a timing table."""
        live, target = self._loop.live, self._loop.target
        if live is None:
            return math.nan
        rows = target.batch_size * target.buckets[0] if target.buckets else step_rows(self._loop, rows)
        hottest = max(s.params.temperature for s in self._sequences)
        return live.at(decoding, hottest).of_round(rows, decoding, drafts=False)

    def _tell(self, live: LiveTimings, own: float) -> None:
        if self.decoded is None:
            live.skip()
        else:
            sampled = any(s.params.temperature > 0 for s in self._sequences)
            grown = sum(bool(s.shape) and (s.policy is None or s.policy.now.levels > 0) for s in self._sequences)
            if self._loop.planner.on_host and not self.decoded and self._decided:
                own = 0.0  # neither plain decoding's, which decides nothing, nor a draft's
            live.round(own, len(self._sequences), self.decoded, sampled, max(grown, 1))


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


def _clock(loop: CountingLoop) -> tuple[float, float, float]:
    """Return the time now, and the draft's and the target's seconds so far."""
    draft = loop.draft_executor
    return time.perf_counter(), draft.seconds if draft else 0.0, loop.target.seconds
