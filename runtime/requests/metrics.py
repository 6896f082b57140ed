"""Metrics of requests and of an engine's rounds, under vLLM's names; times in seconds."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from typing import Any

_COUNTS = "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens"
_PREDICTED = "num_prediction_tokens", "num_accepted_prediction_tokens"


@dataclass(slots=True)
class SpeculationStats:
    """Counts over the rounds of a request that drafted.

    Attributes:
        num_spec_steps: Rounds that drafted.
        num_draft_tokens: Drafted tokens.
        num_accepted_draft_tokens: Drafted tokens that were accepted.
        acceptance_histogram: By k, the number of rounds that accepted k drafted tokens.
        depth_histogram: By d, the number of rounds whose tree had d levels below the root, where that is known.
        decisions: With "auto" in a tuned bundle: the number of rounds by what the policy decided.
        promised: The sum over those rounds of the speedup over plain decoding that the timing table promised.
        num_prediction_tokens: Tokens of the prediction that came with the request.
        num_accepted_prediction_tokens: Output tokens that were the prediction's next ones, drafted or not.
    """

    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    depth_histogram: list[int] = field(default_factory=list)
    decisions: dict[str, int] = field(default_factory=dict)
    promised: float = 0.0
    num_prediction_tokens: int = 0
    num_accepted_prediction_tokens: int = 0

    def record(self, drafted: int, accepted: int, depth: int | None = None) -> None:
        """Count one round that drafted.

        Args:
            drafted: Number of drafted tokens.
            accepted: Number of drafted tokens that were accepted.
            depth: Levels of the round's tree below the root; None if not known.
        """
        self.num_spec_steps += 1
        self.num_draft_tokens += drafted
        self.num_accepted_draft_tokens += accepted
        _count(self.acceptance_histogram, accepted)
        if depth is not None:
            _count(self.depth_histogram, depth)

    def decide(self, kind: str, promised: float = 1.0) -> None:
        """Count one decision of the policy.

        Args:
            kind: What the policy decided for the round, such as "plain" or "model".
            promised: Speedup over plain decoding that the timing table promised for the round.
        """
        self.decisions[kind] = self.decisions.get(kind, 0) + 1
        self.promised += promised

    def merge(self, other: SpeculationStats) -> None:
        """Add the counts in `other`, those of another request."""
        for name in (*_COUNTS, *_PREDICTED, "promised"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("acceptance_histogram", "depth_histogram"):
            for value, times in enumerate(getattr(other, name)):
                _count(getattr(self, name), value, times)
        for kind, times in other.decisions.items():
            self.decisions[kind] = self.decisions.get(kind, 0) + times

    @property
    def mean_acceptance_length(self) -> float:
        """Mean tokens emitted per round that drafted, the bonus token included; 1 if nothing was drafted."""
        return 1 + self.num_accepted_draft_tokens / max(self.num_spec_steps, 1)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted tokens divided by drafted tokens; 0 if nothing was drafted."""
        return self.num_accepted_draft_tokens / max(self.num_draft_tokens, 1)

    def to_dict(self) -> dict[str, Any]:
        """Return vLLM's `speculative_decoding` object, with the counts of a prediction if there was one."""
        rates = "mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram"
        predicted = _PREDICTED if self.num_prediction_tokens else ()
        return {name: getattr(self, name) for name in (*rates, *_COUNTS, "decisions", *predicted)}


def _count(histogram: list[int], value: int, times: int = 1) -> None:
    histogram.extend([0] * (value + 1 - len(histogram)))
    histogram[value] += times


@dataclass(slots=True)
class RequestMetrics:
    """Counts and times of one request.

    `submitted`, `started`, `first_token` and `finished` are seconds on the engine's clock, None if the request never
    came that far. They mean something in this process only, so JSON has the times between them instead.

    Attributes:
        num_prompt_tokens: Tokens of the prompt.
        seed: The sample's own seed.
        speculation: "auto" if a policy chooses each round's tree, else the tree that every round drafts, or "off".
        num_output_tokens: Tokens of the output.
        num_cached_tokens: Tokens of the prompt whose rows were in a cache already.
        submitted: When the caller handed the request over.
        started: When it got its slot.
        first_token: When the first token could be read.
        finished: When it had its result.
        background: Whether it was a background request.
        busy_time: Its share of the seconds of its rounds, by its rows in each of them, so that the shares of all
            requests add up to `RunStats.total`.
        plain_time: Seconds that plain decoding would have taken instead of `busy_time`. Rounds that drafted count by
            the timing table, corrected by how long rounds take; NaN if one drafted and there is no table.
        speculative_decoding: Counts over the rounds that drafted.
    """

    num_prompt_tokens: int
    seed: int
    speculation: str
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    submitted: float | None = None
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None
    background: bool = False
    busy_time: float = 0.0
    plain_time: float = 0.0
    speculative_decoding: SpeculationStats = field(default_factory=SpeculationStats)

    def bill(self, busy: float, plain: float) -> None:
        """Add its share of a round's seconds.

        Args:
            busy: The seconds.
            plain: What plain decoding would have taken instead.
        """
        self.busy_time += busy
        self.plain_time += plain

    @property
    def queue_time(self) -> float:
        """Seconds from submission to the slot, or to the end if it never got one."""
        return _between(self.submitted, self.finished if self.started is None else self.started)

    @property
    def ttft(self) -> float:
        """Seconds from submission to the first token; 0 if there is none."""
        return _between(self.submitted, self.first_token)

    @property
    def e2el(self) -> float:
        """Seconds from submission to the end."""
        return _between(self.submitted, self.finished)

    @property
    def tpot(self) -> float:
        """Mean seconds per output token after the first; 0 if there is none."""
        later = self.num_output_tokens - 1
        return _between(self.first_token, self.finished) / later if later > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return a result's `metrics` object; `ttft` is None without a first token, `tpot` without a second one."""
        times = "queue_time", "ttft", "tpot", "e2el"
        counts = "num_prompt_tokens", "num_output_tokens", "num_cached_tokens"
        told = {name: getattr(self, name) for name in (*times, *counts, "seed", "speculation")}
        if self.first_token is None:
            told["ttft"] = None
        if self.first_token is None or self.num_output_tokens < 2:
            told["tpot"] = None
        return told | {"speculative_decoding": self.speculative_decoding.to_dict()}


def _between(start: float | None, end: float | None) -> float:
    """Return the seconds between two times; 0 if one of them is None."""
    return 0.0 if start is None or end is None else end - start


@dataclass(slots=True)
class RunStats:
    """An engine's time from loading until now by its parts: counts, and seconds. Loops add to it and give out copies.

    Attributes:
        rounds: Rounds.
        emitted: Emitted tokens.
        total: Seconds of all rounds.
        draft: Seconds in the draft model.
        verify: Seconds in the target.
        accept: Seconds of walking trees and emitting tokens; prefill chunks do not count. 0 on a device, which does
            it by itself.
        commit: Seconds of committing accepted rows in the caches; as `accept`.
    """

    rounds: int = 0
    emitted: int = 0
    total: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    accept: float = 0.0
    commit: float = 0.0

    @classmethod
    def sum(cls, parts: Iterable[RunStats]) -> RunStats:
        """Return the sum of `parts`, field by field; all zeros if there are none."""
        return cls(*map(sum, zip(*map(astuple, parts), strict=True)))

    def add(self, **amounts: float) -> None:
        """Add to counts and seconds.

        Args:
            amounts: What to add, by the name of its field.
        """
        for name, amount in amounts.items():
            setattr(self, name, getattr(self, name) + amount)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds that pass inside to a part; nothing if it raises.

        Args:
            part: The name of its field.
        """
        began = time.perf_counter()
        yield
        self.add(**{part: time.perf_counter() - began})

    def since(self, before: RunStats) -> RunStats:
        """Return what was added since `before`, an earlier snapshot."""
        return RunStats(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))

    @property
    def loop(self) -> float:
        """The loop's own seconds: all but model execution."""
        return self.total - self.draft - self.verify

    @property
    def loop_share(self) -> float:
        """The loop's own time as a share of the total; 0 before the first round."""
        return self.loop / self.total if self.total else 0.0

    @property
    def host(self) -> float:
        """The loop's own seconds without accepting and committing."""
        return self.loop - self.accept - self.commit

    def to_dict(self) -> dict[str, Any]:
        """Return counts, seconds and the loop's own share as JSON data."""
        parts = "total", "draft", "verify", "accept", "commit", "host"
        seconds = {f"{part}_s": getattr(self, part) for part in parts}
        counts = {"rounds": self.rounds, "emitted": self.emitted}
        return {**counts, **seconds, "loop_share": self.loop_share}
