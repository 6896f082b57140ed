"""Every contender decodes the same prompts on one engine, in turns: what slows the machine slows them all."""

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
    """A prompt in tokens, its parameters, and its category where it has one."""

    tokens: list[int]
    params: SamplingParams
    category: str | None


@dataclass(slots=True)
class Sample:
    """One request as its caller saw it: seconds from its submission."""

    category: str | None
    tokens: list[int]  # emitted
    ttft: float
    e2el: float
    itl: list[float]
    drafting: SpeculationStats

    @property
    def tpot(self) -> float:
        """Mean seconds of a token after the first, of at least two tokens: the definition of `vllm bench serve`."""
        return (self.e2el - self.ttft) / (len(self.tokens) - 1)

    @property
    def decode(self) -> tuple[float, int]:
        """Seconds after the first reading, and the tokens that came in them; those that came with the first do not."""
        return self.e2el - self.ttft, len(self.itl)


@dataclass(slots=True)
class Turn:
    """A group of requests that ran together: how long it took them all, and where the engine's time went."""

    samples: list[Sample]
    seconds: float
    stats: RunStats


@dataclass(slots=True)
class Stopwatch:
    """When how many tokens of a sequence could be read; `tick` runs on the engine's thread, after each round."""

    sequence: Sequence
    started: float = 0.0
    readings: list[tuple[float, int]] = field(default_factory=list)

    def tick(self) -> None:
        """Note the time where there are new tokens."""
        count = len(self.sequence.output)
        if count > (self.readings[-1][1] if self.readings else 0):
            self.readings.append((time.perf_counter(), count))

    def sample(self, category: str | None) -> Sample:
        """What was measured, once the sequence has ended."""
        first, last = self.readings[0][0], self.readings[-1][0]
        return Sample(
            category,
            self.sequence.output,
            first - self.started,
            last - self.started,
            inter_token_latencies(self.readings),
            self.sequence.metrics.speculative_decoding,
        )


def inter_token_latencies(readings: Seq[tuple[float, int]]) -> list[float]:
    """Seconds of each token after the first reading; `readings`: times, and tokens until then.

    The tokens of one round arrive at once and share the time since the round before: an interval of t with k tokens
    is k latencies of t / k. So their mean is the time per token, where a latency for each arrival would not be.
    """
    latencies: list[float] = []
    for (before, had), (now, has) in pairwise(readings):
        latencies += [(now - before) / (has - had)] * (has - had)
    return latencies


def prepare(engine: Engine, requests: Seq[Request]) -> list[Case]:
    """The prompts in tokens; raises PromptError or OptionError with file and line of the first that cannot run."""
    sequences, refused = engine.requests([r.prompt for r in requests], [r.params for r in requests], "return")
    for chunk in refused:
        if chunk.result and chunk.result.error:
            error = chunk.result.error
            raise type(error)(f"{requests[chunk.index].where}: {error}")
    return [Case(s.tokens, s.params, r.category) for s, r in zip(sequences, requests, strict=True)]


def measure(
    engine: Engine, contenders: Seq[str], cases: Seq[Case], concurrency: int, advance: Callable[[], object]
) -> dict[str, list[Turn]]:
    """Each contender's turns, in the order of the prompts: `concurrency` requests at a time, after a warm-up.

    A group is submitted at once and waited for; then the next contender has it, and each group begins with another
    contender. `advance` is called after every turn. Raises what a request failed with.
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
    """salt: nobody drafts out of habit what another contender, or another time, has said after the same prompt."""
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
