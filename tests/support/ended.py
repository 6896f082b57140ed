"""Requests that have ended, as watchers are told of them, without an engine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from specbuild.runtime import RequestMetrics, Result, SamplingParams, SpeculationStats
from specbuild.serve.request.admission import Admission
from specbuild.serve.request.models import Models, ServedModel

DIGEST = "d" * 64
_LOOP = asyncio.new_event_loop()  # of all watchers: their queues belong to the first that waits for them


class Engine:
    """What a canary and drift ask of an engine."""

    def __init__(self, tokenizer: str = "t") -> None:
        record = SimpleNamespace(sha256=tokenizer)
        self.manifest = SimpleNamespace(buckets=[1, 4, 8], files={"t": record}, tokenizer="t", digest=DIGEST)

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


def served(name: str = "m", tokenizer: str = "t") -> ServedModel:
    engine: Any = SimpleNamespace(engine=Engine(tokenizer))
    return ServedModel((name,), name, engine, {}, Admission(4, 4))  # type: ignore[arg-type]


def models(*names: str) -> Models:
    return Models([served(name) for name in names or ("m",)])


def result(
    ttft: float = 0.1, tpot: float = 0.01, tokens: int = 10, reason: str = "stop", accepted: tuple[int, ...] = ()
) -> Result:
    """A text; `accepted`: tokens of each round that drafted four."""
    stats = SpeculationStats()
    for each in accepted:
        stats.record(4, each)
    times = {"submitted": 0.0, "started": 0.0, "first_token": ttft, "finished": ttft + tpot * (tokens - 1)}
    own = RequestMetrics(3, 1, "auto", num_output_tokens=tokens, speculative_decoding=stats, **times)
    return Result("", [7] * tokens, reason, own)


def generation(model: ServedModel, *results: Result, status: int = 200, **more: Any) -> Any:
    given = {"served": model, "status": status, "results": dict(enumerate(results)), "draw": None, "prompts": [[1, 2]]}
    return SimpleNamespace(**given | {"params": SamplingParams()} | more)


def settle(watcher: Any) -> None:
    """Let a canary, drift or an oracle run until it is done with all that has ended."""

    async def run() -> None:
        running = asyncio.ensure_future(watcher.run())
        await watcher.settled()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    _LOOP.run_until_complete(run())
