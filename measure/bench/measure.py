"""Measures contenders, which decode the same prompts in turns on one engine: other load slows all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import pairwise

from specbuild.runtime import Engine, RunStats, SamplingParams, SpeculationStats
from specbuild.runtime.requests.prompt_file import Request
from specbuild.runtime.requests.sequence import Sequence

BASELINE = "off"  # the contender that all others are compared with: plain decoding


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt's token ids, its parameters, and its category if it has one."""

    tokens: list[int]
    params: SamplingParams
    category: str | None


@dataclass(slots=True)
class Sample:
    """One request as its caller saw it; times are seconds from its submission."""

    category: str | None
    tokens: list[int]  # emitted
    ttft: float
    e2el: float
    itl: list[float]
    drafting: SpeculationStats

    @property
    def tpot(self) -> float:
        """Mean seconds per token after the first, as `vllm bench serve` defines it; needs at least two tokens."""
        return (self.e2el - self.ttft) / (len(self.tokens) - 1)

    @property
    def decode(self) -> tuple[float, int]:
        """Seconds after the first reading and the tokens that came in them, without those of the first reading."""
        return self.e2el - self.ttft, len(self.itl)


@dataclass(slots=True)
class Turn:
    """A group of requests that ran together: their samples, the seconds of all, and where the engine spent time."""

    samples: list[Sample]
    seconds: float
    stats: RunStats


@dataclass(slots=True)
class Stopwatch:
    """Records when how many tokens of a sequence were available; `tick` runs on the engine's thread each round."""

    sequence: Sequence
    started: float = 0.0
    readings: list[tuple[float, int]] = field(default_factory=list)

    def tick(self) -> None:
        """Record the time and the number of tokens, if there are new ones."""
        count = len(self.sequence.output)
        if count > (self.readings[-1][1] if self.readings else 0):
            self.readings.append((time.perf_counter(), count))

    def sample(self, category: str | None) -> Sample:
        """Return the measurements of a sequence that has ended."""
        first, last = (at - self.started for at, _ in (self.readings[0], self.readings[-1]))
        latencies, drafting = inter_token_latencies(self.readings), self.sequence.metrics.speculative_decoding
        return Sample(category, self.sequence.output, first, last, latencies, drafting)


def inter_token_latencies(readings: Seq[tuple[float, int]]) -> list[float]:
    """Return the latency of each token after the first reading; `readings`: times, and the number of tokens by then.

    The tokens of one round arrive at once and share the time since the previous round: an interval of t with k tokens
    gives k latencies of t / k. So their mean is the time per token, which one latency per arrival would not give.
    """
    latencies: list[float] = []
    for (before, had), (now, has) in pairwise(readings):
        latencies += [(now - before) / (has - had)] * (has - had)
    return latencies


def prepare(engine: Engine, requests: Seq[Request]) -> list[Case]:
    """Return the requests as cases; raise PromptError or OptionError with file and line of the first invalid one."""
    sequences, refused = engine.requests([r.prompt for r in requests], [r.params for r in requests], "return")
    for chunk in refused:
        if chunk.result and chunk.result.error:
            error = chunk.result.error
            raise type(error)(f"{requests[chunk.index].where}: {error}")
    return [Case(s.tokens, s.params, r.category) for s, r in zip(sequences, requests, strict=True)]


def measure(
    engine: Engine, contenders: Seq[str], cases: Seq[Case], concurrency: int, advance: Callable[[], object]
) -> dict[str, list[Turn]]:
    """Return each contender's turns, in the order of the prompts, after a warm-up.

    A group of requests is submitted at once and awaited, then given to the next contender. Successive groups begin
    with different contenders.

    Args:
        engine: The engine.
        contenders: Values of `speculation`.
        cases: The prompts.
        concurrency: Requests in a group.
        advance: Called after every turn, also those of the warm-up.

    Raises:
        SpecbuildError: The error of a request that failed.
    """
    groups = [cases[start : start + concurrency] for start in range(0, len(cases), concurrency)]
    turns: dict[str, list[Turn]] = {name: [] for name in contenders}
    for name in contenders:
        _turn(engine, groups[0], name, "warm-up")
        advance()
    for number, group in enumerate(groups):
        first = number % len(contenders)
        for name in [*contenders[first:], *contenders[:first]]:
            turns[name].append(_turn(engine, group, name, f"{name} {concurrency}"))
            advance()
    return turns


def _turn(engine: Engine, group: Seq[Case], speculation: str, salt: str) -> Turn:
    """Decode a group by one contender.

    `salt` separates caches, so no contender drafts from what another one, or an earlier pass, emitted for the prompt.
    """
    params = [replace(case.params, speculation=speculation, cache_salt=salt) for case in group]
    sequences, _ = engine.requests([case.tokens for case in group], params, "raise")
    watches, before = [Stopwatch(sequence) for sequence in sequences], engine.stats
    started, handles = time.perf_counter(), []
    for watch in watches:
        watch.started = time.perf_counter()
        handles.append(engine.scheduler.submit(watch.sequence, watch.tick, each_round=True))
    results = [handle.result() for handle in handles]
    seconds = time.perf_counter() - started
    for result in results:
        if result.error:
            raise result.error
    samples = [watch.sample(case.category) for watch, case in zip(watches, group, strict=True)]
    return Turn(samples, seconds, engine.stats.since(before))
