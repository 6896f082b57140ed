"""Engines that are dropped without `close`: they warn, end what runs, and leave neither threads nor models behind."""

import gc
import threading
import weakref

import pytest
from engine_memory import memory, settled

from specbuild.runtime import AsyncEngine, Engine, LoadOptions, SamplingParams

LONG = SamplingParams(max_new_tokens=100)


def fresh(like, **options):
    """An engine that no fixture holds."""
    engine = Engine(like.manifest, like.tokenizer, like.loop, like.batch_size, LoadOptions(**options))
    engine.closed = closed = threading.Event()
    like.loop.close = closed.set
    return engine


@pytest.mark.slow
@pytest.mark.parametrize("twin", [False, True])
def test_a_dropped_engine_is_closed(hash_engine, twin):
    before, engine = set(threading.enumerate()), fresh(hash_engine())
    assert engine.generate("ab", LONG)[0].finish_reason == "length"
    scheduler, closed = weakref.ref(engine.scheduler), engine.closed
    held = AsyncEngine(engine) if twin else engine
    del engine
    with pytest.warns(ResourceWarning, match=r"^an engine was dropped without close\(\).*use `with`, or close it$"):
        del held
    assert closed.wait(10), "the models are freed"
    settled(before)
    gc.collect()
    assert scheduler() is None


def test_requests_of_a_dropped_engine_are_cancelled(hash_engine):
    like = hash_engine(batch_size=1, gated=True)
    before, engine = set(threading.enumerate()), fresh(like)
    handles = [engine.submit(text, LONG) for text in ("ab", "cd")]
    like.gate.halted()
    with pytest.warns(ResourceWarning):
        del engine
    like.gate.open()
    assert [handle.result(10).finish_reason for handle in handles] == ["cancelled"] * 2
    settled(before)


def test_an_engine_that_was_never_used_is_freed_at_once(hash_engine):
    engine = fresh(hash_engine())
    closed = engine.closed
    with pytest.warns(ResourceWarning):
        del engine
    assert closed.is_set()


@pytest.mark.slow
def test_a_service_that_its_engine_tells_results_is_dropped_with_it(hash_engine):
    like, before = hash_engine(), set(threading.enumerate())

    class Service:
        def __init__(self):
            self.told, self.engine = threading.Event(), fresh(like, on_finish=self.finish)

        def finish(self, result):
            self.told.set()

    def use():
        service = Service()
        service.engine.generate("ab", LONG)
        service.told.wait(10)
        closed = service.engine.closed
        return closed

    def collect():
        for _ in range(100):  # the observer's thread lingers for a second
            gc.collect()
            if closed.wait(0.1):
                return

    closed = use()
    with pytest.warns(ResourceWarning):
        collect()
    assert closed.is_set()
    settled(before)


@pytest.mark.slow
def test_a_stream_keeps_its_engine(hash_engine):
    engine = fresh(hash_engine())
    stream, closed = engine.stream("ab", LONG), engine.closed
    next(stream)
    del engine
    gc.collect()
    assert not closed.is_set()
    with pytest.warns(ResourceWarning):  # when it has ended
        assert [chunk.result.finish_reason for chunk in stream if chunk.result] == ["length"]
    assert closed.wait(10)


def drop(bundle, count):
    for number in range(count):
        engine = Engine.load(bundle, threads=1)
        if number % 2:
            engine.generate("import os", SamplingParams(max_new_tokens=2))
        with pytest.warns(ResourceWarning, match="dropped without close"):
            del engine


def growth(bundle, count, before):
    start = memory()
    drop(bundle, count)
    settled(before)
    return memory() - start


@pytest.mark.nightly
@pytest.mark.parametrize("count", [5, pytest.param(100, marks=pytest.mark.soak)])
def test_dropped_engines_leave_nothing(bundle, count):
    before = set(threading.enumerate())
    drop(bundle, 5)
    settled(before)
    grown = min(growth(bundle, count, before) for _ in range(3 if count < 10 else 1))  # a leak grows every time
    print(f"{count} engines dropped: {grown / 1e6:+.1f} MB, threads {threading.active_count()} of {len(before)}")
    assert grown < 20e6
