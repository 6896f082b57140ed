"""What is measured of a request and of a run, under vLLM's names; times in seconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, field
from typing import Any


@dataclass(slots=True)
class SpeculationStats:
    """Counts of the rounds that drafted.

    `num_unsettled_steps`: those that ended before a choice which rounding might have turned. `num_recomputed_tokens`:
    accepted in a side branch, so computed once more in the next round.
    """

    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_unsettled_steps: int = 0
    num_recomputed_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)  # [k]: rounds that accepted k drafted tokens
    depth_histogram: list[int] = field(default_factory=list)  # [d]: rounds whose tree had d levels, where that is known
    decisions: dict[str, int] = field(default_factory=dict)  # of `auto` in a tuned bundle: rounds by what was decided
    promised: float = 0.0  # the sum of what these rounds promised over plain decoding, by the timing table

    def record(self, drafted: int, accepted: int, depth: int | None = None) -> None:
        """Count one round; `depth`: levels of its tree below the root."""
        self.num_spec_steps += 1
        self.num_draft_tokens += drafted
        self.num_accepted_draft_tokens += accepted
        _count(self.acceptance_histogram, accepted)
        if depth is not None:
            _count(self.depth_histogram, depth)

    def decide(self, kind: str, promised: float = 1.0) -> None:
        """Count what the policy decided for a round, and what that promised over plain decoding."""
        self.decisions[kind] = self.decisions.get(kind, 0) + 1
        self.promised += promised

    def merge(self, other: SpeculationStats) -> None:
        """Add another request's counts."""
        self.num_spec_steps += other.num_spec_steps
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_draft_tokens += other.num_accepted_draft_tokens
        self.num_unsettled_steps += other.num_unsettled_steps
        self.num_recomputed_tokens += other.num_recomputed_tokens
        for own, others in (
            (self.acceptance_histogram, other.acceptance_histogram),
            (self.depth_histogram, other.depth_histogram),
        ):
            for value, times in enumerate(others):
                _count(own, value, times)
        self.promised += other.promised
        for kind, times in other.decisions.items():
            self.decisions[kind] = self.decisions.get(kind, 0) + times

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted a round, the bonus token included; 1 where nothing was drafted."""
        return 1 + self.num_accepted_draft_tokens / max(self.num_spec_steps, 1)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted over drafted tokens; 0 where nothing was drafted."""
        return self.num_accepted_draft_tokens / max(self.num_draft_tokens, 1)

    def to_dict(self) -> dict[str, Any]:
        """vLLM's `speculative_decoding` object."""
        rates = "mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram"
        counts = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
        settled = ("num_unsettled_steps", "num_recomputed_tokens")
        return {name: getattr(self, name) for name in (*rates, *counts, *settled, "decisions")}


def _count(histogram: list[int], value: int, times: int = 1) -> None:
    histogram.extend([0] * (value + 1 - len(histogram)))
    histogram[value] += times


@dataclass(slots=True)
class RequestMetrics:
    """One request: what it has, and when what became of it, in seconds on the engine's clock.

    `submitted`: its caller handed it over. `started`: it got its slot. `first_token`: the first token could be read.
    `finished`: it had its result. Each is None where it never came to that, and means something in this process alone,
    so JSON has the times between them instead. `background`: as it was asked for.

    `busy_time`: its share of the seconds of the rounds that it took part in, by its rows in each of them, so that those
    of all requests add up to `RunStats.total`. `plain_time`: what they would have been by plain decoding, as far as a
    round drafted by the timing table, corrected by what rounds take; NaN where one drafted and there is no table.
    """

    num_prompt_tokens: int
    seed: int
    speculation: str
    num_output_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt: read from a cache that had them
    submitted: float | None = None
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None
    background: bool = False
    busy_time: float = 0.0
    plain_time: float = 0.0
    speculative_decoding: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def queue_time(self) -> float:
        """Seconds from submission to the slot, or to the end where it never got one."""
        return _between(self.submitted, self.finished if self.started is None else self.started)

    @property
    def ttft(self) -> float:
        """Seconds from submission to the first token; 0 where there is none."""
        return _between(self.submitted, self.first_token)

    @property
    def e2el(self) -> float:
        """Seconds from submission to the end."""
        return _between(self.submitted, self.finished)

    @property
    def tpot(self) -> float:
        """Mean seconds of an output token after the first; 0 where there is none."""
        later = self.num_output_tokens - 1
        return _between(self.first_token, self.finished) / later if later > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The `metrics` object of a result; `ttft` is None where there is no token, `tpot` where there is no second."""
        times = "queue_time", "ttft", "tpot", "e2el"
        counts = "num_prompt_tokens", "num_output_tokens", "num_cached_tokens"
        told = {name: getattr(self, name) for name in (*times, *counts, "seed", "speculation")}
        if self.first_token is None:
            told["ttft"] = None
        if self.first_token is None or self.num_output_tokens < 2:
            told["tpot"] = None
        return told | {"speculative_decoding": self.speculative_decoding.to_dict()}


def _between(start: float | None, end: float | None) -> float:
    """Seconds between two times; 0 where one of them never came."""
    return 0.0 if start is None or end is None else end - start


@dataclass(frozen=True, slots=True)
class RunStats:
    """Where an engine's time went from when it was loaded until now: the models, and the loop around them.

    It never changes: a later one is another.
    `accept`, `commit`: of rounds that decode; 0 on a device, which does both by itself. A prompt's chunks have neither.
    `told`, `timed`: of what the timing table has seconds of, these and the clock's; 0 where there is none.
    """

    rounds: int = 0
    emitted: int = 0
    total: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    accept: float = 0.0
    commit: float = 0.0
    told: float = 0.0
    timed: float = 0.0

    @classmethod
    def sum(cls, parts: Iterable[RunStats]) -> RunStats:
        """Of all parts together; of none, nothing."""
        return cls(*map(sum, zip(*map(astuple, parts), strict=True)))

    def since(self, before: RunStats) -> RunStats:
        """What was added to a copy that was made before."""
        return RunStats(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))

    @property
    def loop(self) -> float:
        """The loop's own time: all but model execution."""
        return self.total - self.draft - self.verify

    @property
    def loop_share(self) -> float:
        """The loop's own time as a share of all."""
        return self.loop / self.total if self.total else 0.0

    @property
    def correction(self) -> float:
        """What steps and rounds took, over what the timing table says; 1 where there is none."""
        return self.timed / self.told if self.told else 1.0

    @property
    def host(self) -> float:
        """What is left of the loop's time without accepting and committing."""
        return self.loop - self.accept - self.commit

    def to_dict(self) -> dict[str, Any]:
        """Counts, seconds and the loop's own share."""
        seconds = {
            f"{part}_s": getattr(self, part) for part in ("total", "draft", "verify", "accept", "commit", "host")
        }
        counts = {"rounds": self.rounds, "emitted": self.emitted}
        return {**counts, **seconds, "loop_share": self.loop_share, "correction": self.correction}


@dataclass(slots=True)
class Tally:
    """A loop's own `RunStats`, to be added to."""

    rounds: int = 0
    emitted: int = 0
    total: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    accept: float = 0.0
    commit: float = 0.0
    told: float = 0.0
    timed: float = 0.0

    def snapshot(self) -> RunStats:
        """What it is now."""
        return RunStats(*astuple(self))
