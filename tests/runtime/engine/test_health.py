"""Health and usage: each state is told, also while a round hangs, and everything in the engine is counted."""

import pytest

from specbuild.runtime import Health, SamplingParams
from specbuild.runtime.engine.health import Pulse

SHORT = SamplingParams(max_new_tokens=6, speculation="off")


def test_an_engine_says_what_it_does(hash_engine, clock):
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


def test_everything_in_an_engine_is_counted(hash_engine):
    engine = hash_engine(batch_size=2, max_waiting=1, gated=True)
    usage = engine.usage
    assert (usage.waiting, usage.running, usage.slots, usage.max_waiting) == (0, 0, 2, 1)
    assert (usage.cache_tokens, usage.reusable_tokens, usage.cache_capacity_tokens) == (0, 0, 2 * 192)
    first, *others = engine.requests([[1] * 5, [2] * 4, [3], [4], [5]], SHORT, "raise")[0]
    handles = [engine.scheduler.submit(first)]
    engine.gate.halted()
    engine.gate.step()  # the first prompt is read, and its first token emitted
    handles += map(engine.scheduler.submit, others)
    usage = engine.usage
    assert (usage.running, usage.waiting, usage.cache_tokens) == (2, 3, 5), "one waits, and two stand in line"
    engine.gate.open()
    for handle in handles:
        handle.result(60)
    with engine.scheduler.exclusive():
        usage = engine.usage
        assert (usage.running, usage.waiting, usage.cache_tokens) == (0, 0, 0)
        assert usage.reusable_tokens > 0
    engine.close()
    assert engine.usage.reusable_tokens == 0


def test_a_round_is_counted_however_it_ends(clock):
    pulse = Pulse(clock)
    with pytest.raises(ValueError, match="no"), pulse.round():
        raise ValueError("no")
    assert (pulse.rounds, pulse.in_round) == (1, False)


def test_statistics_are_the_caller_s_own(hash_engine):
    engine = hash_engine()
    before = engine.stats
    engine.stats.rounds = 5
    engine.generate("ab", SHORT)
    assert (before.rounds, engine.stats.rounds, engine.health().rounds) == (0, 6, 6)
