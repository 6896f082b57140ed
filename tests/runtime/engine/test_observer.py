"""An observer is told every result in order, on its own thread; it delays nobody, whatever it does."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from specbuild.runtime import Engine, LoadOptions, RequestMetrics, Result, SamplingParams
from specbuild.runtime.engine.observer import Observer

SHORT = SamplingParams(max_new_tokens=6)


def result_of(number: int) -> Result:
    return Result(str(number), [number], "length", RequestMetrics(1, 0, "off"))


class Slow:
    """Takes results one at a time, when it is let."""

    def __init__(self) -> None:
        self.told, self.called, self.go = list[Result](), threading.Event(), threading.Event()

    def __call__(self, result: Result) -> None:
        self.called.set()
        assert self.go.wait(60)
        self.told.append(result)


@pytest.fixture
def observed(hash_engine: Callable[..., Engine]) -> Callable[..., Any]:
    """`observed(call, **hash_engine's)`: an engine whose results are told to `call`."""

    def make(call: Callable[[Result], object], **options: Any) -> Any:
        engine: Any = hash_engine(**options)
        engine.scheduler._observer = Observer(call)
        return engine

    return make


@pytest.mark.parametrize("error", [ValueError("no disk"), SystemExit(1), KeyboardInterrupt()])
def test_what_it_raises_is_logged_and_forgotten(error: BaseException, caplog: Any, logged: Any) -> None:
    """On another thread, in order."""
    told, threads = list[str](), set[int]()

    def call(result: Result) -> None:
        told.append(result.text)
        threads.add(threading.get_ident())
        if result.text == "0":
            raise error

    observer = Observer(call)
    with caplog.at_level(logging.ERROR, "specbuild"):
        for number in range(100):
            observer.tell(result_of(number))
        observer.close(60)
    assert told == [str(number) for number in range(100)]
    assert (len(threads - {threading.get_ident()}), observer.dropped) == (1, 0)
    (record,) = logged()
    assert (record.name, record.message) == ("specbuild", "on_finish raised, and the engine goes on")
    assert record.exc_info
    assert record.exc_info[1] is error


def test_a_slow_one_is_told_what_fits_and_the_rest_is_counted() -> None:
    slow = Slow()
    observer = Observer(slow, max_results=3)
    observer.tell(result_of(0))
    assert slow.called.wait(60)
    for number in range(1, 10):
        observer.tell(result_of(number))
    assert observer.dropped == 6
    slow.go.set()
    observer.close(60)
    assert [result.text for result in slow.told] == ["0", "1", "2", "3"]
    observer.tell(result_of(10))
    assert (len(slow.told), observer.dropped) == (4, 7), "after its end nothing is told"


def test_closing_waits_no_longer_than_it_has_patience() -> None:
    slow = Slow()
    observer = Observer(slow)
    for number in range(5):
        observer.tell(result_of(number))
    assert slow.called.wait(60)
    observer.close(0)
    assert observer.dropped == 4, "the one under way cannot be taken back"
    slow.go.set()
    observer.close(60)
    assert [result.text for result in slow.told] == ["0"]


def test_a_system_without_threads_costs_results_and_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    told = list[Result]()
    observer = Observer(told.append)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        observer.tell(result_of(0))
    observer.tell(result_of(1))
    observer.close(60)
    assert ([result.text for result in told], observer.dropped) == (["1"], 1)


def test_every_request_is_told_however_it_ended(observed: Callable[..., Any], clock: Any) -> None:
    told = list[Result]()
    engine = observed(told.append, batch_size=1, gated=True, clock=clock)
    running = engine.submit("ab", SHORT)
    engine.gate.halted()
    late, waiting = engine.submit("cd", SamplingParams(deadline=1)), engine.submit("ef", SHORT)
    waiting.cancel()
    clock.now = 2.0
    bad = engine.submit([engine.model.NAN], SHORT)
    engine.gate.open()
    ended = [waiting.result(60), late.result(60), running.result(60), bad.result(60)]
    engine.close()
    assert [result.finish_reason for result in told] == ["cancelled", "deadline", "length", "error"]
    assert all(result is other for result, other in zip(told, ended, strict=True))
    never, expired, whole, _ = (result.metrics for result in told)
    assert (never.started, never.first_token, expired.started) == (None, None, None)
    assert (never.submitted, expired.queue_time, whole.started) == (0.0, 2.0, 0.0)


def test_a_stuck_observer_delays_no_request(observed: Callable[..., Any]) -> None:
    slow = Slow()
    engine = observed(slow, batch_size=2)
    assert len(engine.generate([[i] for i in range(9)], SHORT)) == 9
    assert engine.usage.dropped_results == 0
    slow.go.set()
    engine.close()
    assert len(slow.told) == 9


def test_one_that_closes_its_engine_is_told_the_rest(observed: Callable[..., Any]) -> None:
    told, over = list[str](), threading.Event()

    def call(result: Result) -> None:
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


def test_an_engine_takes_one(hash_engine: Callable[..., Engine]) -> None:
    like: Any = hash_engine()
    told = list[Result]()
    with Engine(like.manifest, like.tokenizer, like.loop, 1, LoadOptions(on_finish=told.append)) as engine:
        results = engine.generate(["ab", "cd"], SHORT)
    assert told == results
