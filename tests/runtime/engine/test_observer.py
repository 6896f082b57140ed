"""An observer is told every result in order, on its own thread; it delays nobody, whatever it does."""

import logging
import threading

import pytest

from specbuild.runtime import Engine, LoadOptions, RequestMetrics, Result, SamplingParams
from specbuild.runtime.engine.observer import Observer

SHORT = SamplingParams(max_new_tokens=6)


def result_of(number):
    return Result(str(number), [number], "length", RequestMetrics(1, 0, "off"))


class Slow:
    """Takes results one at a time, when it is let."""

    def __init__(self):
        self.told, self.called, self.go = list[Result](), threading.Event(), threading.Event()

    def __call__(self, result):
        self.called.set()
        assert self.go.wait(60)
        self.told.append(result)


@pytest.fixture
def observed(hash_engine):
    """`observed(call, **hash_engine's)`: an engine whose results are told to `call`."""

    def make(call, batch_size=1, clock=None, **gated):
        like = hash_engine(batch_size, clock=clock, **gated)
        options, times = LoadOptions(on_finish=call), [clock] if clock else []
        engine = Engine(like.manifest, like.tokenizer, like.loop, batch_size, options, *times)
        engine.model, engine.gate = like.model, like.gate
        return engine

    return make


@pytest.mark.parametrize("error", [ValueError("no disk"), SystemExit(1), KeyboardInterrupt()])
def test_what_it_raises_is_logged_and_forgotten(error, caplog, logged):
    """On another thread, in order."""
    told = list[tuple[str, bool]]()

    def call(result):
        told.append((result.text, threading.current_thread() is threading.main_thread()))
        if result.text == "0":
            raise error

    observer = Observer(call)
    with caplog.at_level(logging.ERROR, "specbuild"):
        for number in range(100):
            observer.tell(result_of(number))
        observer.close(60)
    assert (told, observer.dropped) == ([(str(number), False) for number in range(100)], 0)
    (record,) = logged()
    assert record.message == "on_finish raised, and the engine goes on"
    assert record.exc_info[1] is error


@pytest.mark.parametrize(("patience", "told"), [(60, ["0", "1", "2", "3"]), (0, ["0"])])
def test_a_slow_one_is_told_what_fits_and_the_rest_is_counted(patience, told):
    """Closing waits no longer than it has patience; the one under way cannot be taken back."""
    slow = Slow()
    observer = Observer(slow, max_results=3)
    observer.tell(result_of(0))
    assert slow.called.wait(60)
    for number in range(1, 10):
        observer.tell(result_of(number))
    assert observer.dropped == 6
    if patience:
        slow.go.set()
    observer.close(patience)
    slow.go.set()
    observer.close(60)
    observer.tell(result_of(10))
    assert ([result.text for result in slow.told], observer.dropped) == (told, 11 - len(told)), "none after its end"


def test_a_system_without_threads_costs_results_and_no_request(monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    told = list[Result]()
    observer = Observer(told.append)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        observer.tell(result_of(0))
    observer.tell(result_of(1))
    observer.close(60)
    assert ([result.text for result in told], observer.dropped) == (["1"], 1)


def test_every_request_is_told_however_it_ended(observed, clock):
    told = list[Result]()
    engine = observed(told.append, gated=True, clock=clock)
    running = engine.submit("ab", SHORT)
    engine.gate.halted()
    late, waiting = engine.submit("cd", SamplingParams(deadline=1)), engine.submit("ef", SHORT)
    waiting.cancel()
    clock.now = 2.0
    bad = engine.submit([engine.model.NAN], SHORT)
    engine.gate.open()
    ended = [handle.result(60) for handle in (waiting, late, running, bad)]
    engine.close()
    assert [result.finish_reason for result in told] == ["cancelled", "deadline", "length", "error"]
    assert all(result is other for result, other in zip(told, ended, strict=True))


def test_a_stuck_observer_delays_no_request(observed):
    slow = Slow()
    engine = observed(slow, batch_size=2)
    assert len(engine.generate([[i] for i in range(9)], SHORT)) == 9
    assert engine.usage.dropped_results == 0
    slow.go.set()
    engine.close()
    assert len(slow.told) == 9


def test_one_that_closes_its_engine_is_told_the_rest(observed):
    told, over = list[str](), threading.Event()

    def call(result):
        told.append(result.finish_reason)
        engine.close()
        if len(told) == 3:
            over.set()

    engine = observed(call, batch_size=1, gated=True)
    handles = [engine.submit("ab", SHORT) for _ in range(3)]
    engine.gate.open()
    for handle in handles:
        handle.result(60)
    assert over.wait(60)
    assert engine.scheduler.closed
