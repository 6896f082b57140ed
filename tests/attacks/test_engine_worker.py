"""Whatever raises or hangs in an engine: every request ends, callers return, and the innocent go on."""

import gc
import logging
import queue
import threading
import time
from typing import Any

import pytest
from engine_checks import LONG, SHORT, at_rest
from serving import until

from specbuild.runtime import SamplingParams
from specbuild.runtime.errors import EngineClosedError


class Panic(BaseException):
    """As what a tokenizer written in Rust raises; it cannot even be told."""

    def __str__(self):
        raise ValueError("no text")


ERRORS = [RuntimeError("a bug"), Panic(), SystemExit(3), KeyboardInterrupt()]


def in_time(call, *given):
    """What a call gives within ten seconds."""
    out = []
    thread = threading.Thread(target=lambda: out.append(call(*given)), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), f"{call} hangs"
    return out[0] if out else None


def raiser(error):
    def call(*_, **__):
        raise error

    return call


@pytest.mark.parametrize("error", ERRORS)
def test_who_listens_and_raises_harms_nobody(hash_engine, error):
    engine = hash_engine(batch_size=2, on_finish=raiser(error))
    ((sequence,), _) = engine.requests("ab", SHORT, "raise")
    handle = engine.scheduler.submit(sequence, raiser(error), each_round=True)
    beside = engine.submit("cd", SHORT)
    assert (handle.result(10).finish_reason, beside.result(10).finish_reason) == ("length", "length")
    at_rest(engine)


def test_listening_needs_no_lock(hash_engine):
    """Who is woken may wait for a thread that itself asks the engine."""
    engine = hash_engine(batch_size=1)
    ((sequence,), _) = engine.requests("ab", SHORT, "raise")
    seen = list[int]()
    handle = engine.scheduler.submit(sequence, lambda: seen.append(in_time(lambda: engine.usage.slots)), True)
    assert handle.result(60).finish_reason == "length"
    at_rest(engine)
    assert set(seen) == {1}


@pytest.mark.parametrize("call", ["close", "drain"])
def test_closing_from_who_listens(hash_engine, call):
    engine = hash_engine(batch_size=1)
    ((sequence,), _) = engine.requests("ab", LONG, "raise")
    once = [lambda: engine.close() if call == "close" else engine.drain(0)]
    handle = engine.scheduler.submit(sequence, lambda: once.pop()() if once and sequence.output else None, True)
    assert handle.result(10).finish_reason == "cancelled"
    in_time(engine.close)
    assert engine.loop.target.closed


@pytest.mark.parametrize("used", [True, False])
def test_closing_from_an_exclusive_section(hash_engine, used):
    engine = hash_engine()
    if used:
        engine.generate("ab", SHORT)

    def inside():
        with engine.scheduler.exclusive():
            engine.close()

    in_time(inside)
    in_time(engine.close)
    assert engine.loop.target.closed


def test_a_stream_that_is_collected_amid_a_sweep(hash_engine):
    """A finalizer runs wherever the collector does, also with the engine's lock held by the same thread."""
    at_a_bad_time = list[Any]()

    def clock():  # which is asked with the lock held
        if at_a_bad_time:
            at_a_bad_time.pop()()
        return time.perf_counter()

    engine = hash_engine(batch_size=1, gated=True, clock=clock)
    running, stream = engine.submit("ab", SHORT), engine.stream(["cd", "ef"], LONG)
    engine.gate.halted()
    asking = threading.Thread(target=next, args=(stream, None))
    asking.start()
    while engine.usage.waiting < 2:
        pass
    waiting = [*engine.scheduler.waiting]

    def collect():
        for handle in waiting:
            handle.cancel()
        assert not waiting[0].done, "what holds the lock is not disturbed"
        gc.collect()

    at_a_bad_time.append(collect)
    last = engine.submit("gh", SHORT)
    engine.gate.open()
    ends = [handle.result(10).finish_reason for handle in (running, *waiting, last)]
    assert ends == ["length", "cancelled", "cancelled", "length"]
    asking.join(10)
    stream.close()
    at_rest(engine)


@pytest.mark.slow
def test_a_worker_that_hangs_is_told_and_holds_nobody(hash_engine):
    engine = hash_engine(batch_size=2, max_waiting=1, gated=True)
    engine.scheduler.stall_timeout, told = 0.05, queue.SimpleQueue[logging.LogRecord]()
    handler = logging.Handler()
    handler.emit = told.put
    logging.getLogger("specbuild").addHandler(handler)
    try:
        late = engine.submit("ab", SamplingParams(max_new_tokens=100, deadline=0.5))
        engine.gate.halted()
        stopped, waits = engine.submit("cd", LONG), engine.submit("ef", SamplingParams(deadline=0.5))
        record = told.get(timeout=10)
    finally:
        logging.getLogger("specbuild").removeHandler(handler)
    assert "no round has ended" in record.getMessage()
    assert (record.levelname, "step" in record.getMessage()) == ("WARNING", True), "it says where"
    assert engine.health().state == "stuck"
    stopped.cancel()
    assert stopped.result(10).finish_reason == "cancelled"
    assert [handle.result(10).finish_reason for handle in (late, waits)] == ["deadline", "deadline"]
    left = engine.submit("ab", LONG)
    assert in_time(engine.drain, 0.1) is False
    assert left.result(0).finish_reason == "cancelled"
    in_time(engine.close)
    assert not engine.loop.target.closed, "a model is not freed under a round"
    engine.gate.open()
    until(lambda: engine.loop.target.closed, 10)
    assert late.result().token_ids == [], "a result never changes"


def test_a_tokenizer_that_hangs_holds_no_lock(hash_engine):
    engine, entered, go = hash_engine(batch_size=2), threading.Event(), threading.Event()
    ((sequence,), _) = engine.requests("ab", SHORT, "raise")

    class Slow:
        @property
        def text(self):
            entered.set()
            go.wait(60)
            return ""

        def push(self, token):
            return False

        def finish(self):
            pass

    sequence.detokenizer = Slow()
    handle = engine.scheduler.submit(sequence)
    assert entered.wait(10)
    beside = in_time(engine.submit, "cd", SHORT)
    assert in_time(lambda: engine.usage.running) >= 1
    go.set()
    assert (handle.result(10).finish_reason, beside.result(10).finish_reason) == ("length", "length")


def test_waits_beyond_what_threads_can_wait(hash_engine):
    engine = hash_engine()
    assert engine.submit("ab", SHORT).result(1e18).finish_reason == "length"
    assert in_time(engine.drain, float("inf")) is True


@pytest.mark.parametrize("error", ERRORS)
def test_a_bug_ends_every_request_and_the_engine(hash_engine, error):
    engine = hash_engine(batch_size=2, max_waiting=1, gated=True)
    (*sequences, late), _ = engine.requests([[i] for i in range(6)], SHORT, "raise")
    handles = [engine.scheduler.submit(sequence) for sequence in sequences]  # two run, one waits, two stand in line
    engine.loop.release = raiser(error)
    engine.gate.open()
    assert {handle.result(10).finish_reason for handle in handles} == {"error", "length"}
    assert (engine.health().state, engine.health().error is None) == ("failed", False)
    assert engine.scheduler.submit(late).result(10).finish_reason == "error"
    with pytest.raises(EngineClosedError, match="ended by a bug"):
        engine.generate("ab")
    in_time(engine.close)
    assert in_time(engine.drain) is False


def test_a_request_that_finds_no_slot_for_a_bug_ends_alone(hash_engine):
    engine = hash_engine(batch_size=1, gated=True)
    running, bad, good = (engine.submit(each, SHORT) for each in ("ab", "cd", "ef"))
    engine.gate.halted()
    pick = engine.loop.admission.pick
    engine.loop.admission.pick = lambda sequence, free: 1 / 0 if sequence is bad.sequence else pick(sequence, free)
    engine.gate.open()
    assert [each.result(10).finish_reason for each in (running, bad, good)] == ["length", "error", "length"]
    at_rest(engine)


def test_a_clock_that_fails_ends_requests_all_the_same(hash_engine):
    engine = hash_engine(gated=True)
    running, clock = engine.submit("ab", SHORT), engine.scheduler.clock
    engine.gate.halted()
    engine.scheduler.clock = raiser(OSError("no time"))
    engine.gate.open()
    assert running.result(10).finish_reason in ("error", "length")
    engine.scheduler.clock = clock
