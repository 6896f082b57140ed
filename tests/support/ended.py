"""Requests that have ended, as watchers are told of them, without an engine."""

import asyncio
from types import SimpleNamespace

from specbuild.runtime import RequestMetrics, Result, SamplingParams, SpeculationStats
from specbuild.serve.request.admission import Admission
from specbuild.serve.request.models import Models, ServedModel

DIGEST = "d" * 64
_LOOP = asyncio.new_event_loop()  # of all watchers: their queues belong to the first that waits for them


class Engine:
    """What watchers need of an engine."""

    def __init__(self, tokenizer="t"):
        record = SimpleNamespace(sha256=tokenizer)
        self.manifest = SimpleNamespace(buckets=[1, 4, 8], files={"t": record}, tokenizer="t", digest=DIGEST)

    def decode(self, tokens):
        return " ".join(map(str, tokens))


def served(name="m", tokenizer="t"):
    engine = SimpleNamespace(engine=Engine(tokenizer))
    return ServedModel((name,), name, engine, {}, Admission(4, 4))


def models(*names):
    return Models([served(name) for name in names or ("m",)])


def result(ttft=0.1, tpot=0.01, tokens=10, reason="stop", accepted=()):
    """A text; `accepted`: tokens of each round that drafted four."""
    stats = SpeculationStats()
    for each in accepted:
        stats.record(4, each)
    times = {"submitted": 0.0, "started": 0.0, "first_token": ttft, "finished": ttft + tpot * (tokens - 1)}
    own = RequestMetrics(3, 1, "auto", num_output_tokens=tokens, speculative_decoding=stats, **times)
    return Result("", [7] * tokens, reason, own)


def generation(model, *results, status=200, **more):
    given = {"served": model, "status": status, "results": dict(enumerate(results)), "draw": None, "prompts": [[1, 2]]}
    given |= {"samples": 1, "engine": getattr(model.engine, "engine", None)}
    return SimpleNamespace(**given | {"params": SamplingParams()} | more)


def settle(watcher):
    """Let a watcher run until it is done with all that has ended."""

    async def run():
        running = asyncio.ensure_future(watcher.run())
        await watcher.settled()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    _LOOP.run_until_complete(run())


def finish(watcher):
    """Let a watcher run until it ends by itself."""
    _LOOP.run_until_complete(asyncio.wait_for(watcher.run(), 30))
