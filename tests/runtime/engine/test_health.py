"""Health and usage: each state is told, also while a round hangs, and everything in the engine is counted."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest

from specbuild.runtime import Health, SamplingParams
from specbuild.runtime.engine.health import Pulse, health_of

SHORT = SamplingParams(max_new_tokens=6, speculation="off")


def test_the_first_state_that_holds_is_told(clock: Any) -> None:
    pulse, failure = Pulse(clock), ValueError("a bug")
    order: list[tuple[str, tuple[Any, ...]]] = [
        ("idle", (None, False, False, False, False)),
        ("running", (None, False, False, False, True)),
        ("exclusive", (None, False, False, True, True)),
        ("draining", (None, False, True, True, True)),
        ("closed", (None, True, True, True, True)),
        ("failed", (failure, True, True, True, True)),
    ]
    assert [health_of(pulse, *asked).state for _, asked in order] == [state for state, _ in order]
    assert health_of(pulse, *order[-1][1]).error == "ValueError('a bug')"


def test_seconds_count_from_the_last_round_while_something_runs(clock: Any) -> None:
    pulse = Pulse(clock)
    clock.now = 100.0
    assert health_of(pulse, None, False, False, False, False).seconds_since_round is None
    pulse.begin()
    clock.now = 103.0
    assert health_of(pulse, None, False, False, False, True) == Health("running", 0, 3.0, None)

    def fail() -> None:
        with pulse.round():
            clock.now = 104.0
            assert health_of(pulse, None, False, False, False, True) == Health("running", 0, 4.0, "round")
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    clock.now = 104.5
    assert health_of(pulse, None, False, False, False, True) == Health("running", 1, 0.5, None)


def test_what_is_told_never_changes(hash_engine: Any) -> None:
    engine = hash_engine()
    for told, name in ((engine.health(), "rounds"), (engine.usage, "waiting")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(told, name, 5)
    before = engine.stats
    engine.stats.rounds = 5  # a copy of the caller's own
    engine.generate("ab", SHORT)
    assert (before.rounds, engine.stats.rounds, engine.health().rounds) == (0, 6, 6)


def test_an_engine_says_what_it_does(hash_engine: Any, clock: Any) -> None:
    engine = hash_engine(gated=True, clock=clock)
    assert engine.health() == Health("idle", 0, None, "request")
    clock.now = 50.0
    handle = engine.submit("ab", SHORT)
    engine.gate.halted()
    clock.now = 80.0
    assert engine.health() == Health("running", 0, 30.0, "round"), "the round hangs, and this answers"
    engine.gate.step()
    assert engine.health() == Health("running", 1, 0.0, "round")
    engine.gate.open()
    handle.result(60)
    with engine.scheduler.exclusive():
        assert engine.health() == Health("exclusive", 6, None, "exclusive section")
    assert engine.health() == Health("idle", 6, None, "request")
    engine.close()
    assert engine.health() == Health("closed", 6, None, None)


def test_it_answers_while_somebody_holds_the_scheduler(hash_engine: Any) -> None:
    engine, found = hash_engine(), list[Health]()
    with engine.scheduler._lock:
        asking = threading.Thread(target=lambda: found.append(engine.health()))
        asking.start()
        asking.join(60)
    assert [each.state for each in found] == ["idle"]


def test_a_worker_that_died_is_told(hash_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = hash_engine()

    def release(slot: int) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(engine.loop, "release", release)
    engine.submit("ab", SHORT).result(60)
    engine.scheduler._worker.join(60)
    assert (engine.health().state, engine.health().error) == ("failed", "RuntimeError('a bug')")
    assert engine.drain(60) is False


def test_everything_in_an_engine_is_counted(hash_engine: Any) -> None:
    engine = hash_engine(batch_size=2, max_waiting=1, gated=True)
    usage = engine.usage
    assert (usage.waiting, usage.running, usage.slots, usage.max_waiting) == (0, 0, 2, 1)
    assert (usage.cache_tokens, usage.reusable_tokens, usage.cache_capacity_tokens) == (0, 0, 2 * 192)
    sequences, _ = engine.requests([[1] * 5, [2] * 4, [3], [4], [5]], SHORT, "raise")
    first = engine.scheduler.submit(sequences[0])
    engine.gate.halted()
    engine.gate.step()  # the first prompt is read, and its first token emitted
    handles = [first, *(engine.scheduler.submit(sequence) for sequence in sequences[1:])]
    usage = engine.usage
    assert (usage.running, usage.waiting) == (2, 3), "one waits, and two stand in line"
    assert usage.cache_tokens == 5
    engine.gate.open()
    for handle in handles:
        handle.result(60)
    with engine.scheduler.exclusive():
        usage = engine.usage
        assert (usage.running, usage.waiting, usage.cache_tokens) == (0, 0, 0)
        assert usage.reusable_tokens == sum(engine.loop.cached_tokens()) > 0
    engine.close()
    assert engine.usage.reusable_tokens == 0
