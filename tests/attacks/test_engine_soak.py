"""A long life: thousands of requests, a third of them cancelled, and an engine that is as it was."""

from __future__ import annotations

import random
import threading
from collections import Counter
from pathlib import Path

import pytest
from engine_memory import memory, settled

from specbuild.runtime import Engine, Handle, SamplingParams

CANCELLED = 0.3
WARM_UP = 1000  # requests, after which as many plans of steps are kept as ever will be: about 12 MB a model
BOUND = 16e6  # bytes that resident memory may grow by between the warm-up's end and the last request


def serve(engine: Engine, count: int, prompts: list[str], rng: random.Random) -> Counter[str]:
    """`count` requests, so many at a time that some always wait; how they ended."""
    reasons, open_handles = Counter[str](), list[Handle]()
    for _ in range(count):
        params = SamplingParams(rng.randint(1, 16), rng.choice([0.0, 0.8]), seed=rng.randrange(99))
        handle = engine.submit(rng.choice(prompts), params)
        if rng.random() < CANCELLED:
            next(iter(handle)) if rng.random() < 0.5 else None
            handle.cancel()
        open_handles.append(handle)
        if len(open_handles) == 16:
            reasons.update(each.result(60).finish_reason for each in open_handles)
            open_handles.clear()
    reasons.update(each.result(60).finish_reason for each in open_handles)
    return reasons


@pytest.mark.slow(only=("40",))
@pytest.mark.soak(only=("2000",))
@pytest.mark.parametrize("count", [40, 2000])
def test_many_requests_leave_nothing_behind(bundle: Path, prompts: list[str], count: int) -> None:
    before, rng = set(threading.enumerate()), random.Random(1)
    with Engine.load(bundle, batch_size=4, max_waiting=8) as engine:
        serve(engine, min(count, WARM_UP), prompts, rng)
        start = memory()
        reasons = serve(engine, count, prompts, rng)
        grown = memory() - start
        with engine.scheduler.exclusive():
            assert sorted(engine.scheduler.free) == [0, 1, 2, 3]
            usage = engine.usage
            assert (usage.running, usage.waiting, usage.to_come) == (0, 0, 0)
    settled(before)
    print(f"{count} requests: {grown / 1e6:+.1f} MB, {dict(reasons)}")
    assert reasons.total() == count
    assert set(reasons) <= {"length", "stop", "cancelled"}
    assert reasons["cancelled"] > 0.1 * count
    assert grown < BOUND
