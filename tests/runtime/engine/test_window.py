"""A window keeps no more than its size submitted, one of them at most in line for room, until all have ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from engine_checks import LONG, SHORT, at_rest, expected

from specbuild.runtime import Chunk, Handle, SamplingParams
from specbuild.runtime.engine.window import Window
from specbuild.runtime.errors import QueueFullError
from specbuild.runtime.requests.sequence import Sequence


def sequences_of(engine: Any, count: int, params: SamplingParams = SHORT) -> list[Sequence]:
    sequences, _ = engine.requests([[i % 9, i // 9] for i in range(count)], params, "raise")
    return list(sequences)


class Submissions:
    """What is submitted to a scheduler from now on, and how much room there was then."""

    def __init__(self, engine: Any, patch: pytest.MonkeyPatch) -> None:
        self.handles, self.waiting, self.overflow = list[Handle](), list[int](), list[int]()
        inner = engine.scheduler.submit

        def submit(*arguments: Any, **options: Any) -> Handle:
            handle: Handle = inner(*arguments, **options)
            self.handles.append(handle)
            self.waiting.append(len(engine.scheduler.waiting))
            self.overflow.append(len(engine.scheduler.overflow))
            return handle

        patch.setattr(engine.scheduler, "submit", submit)


def drained(
    window: Window, changed: threading.Event, each: Callable[[Chunk], object] = lambda chunk: None
) -> list[Chunk]:
    """Every chunk of a window, as its owner reads them."""
    chunks = list[Chunk]()
    while window.pending:
        changed.clear()
        for chunk in window.chunks():
            chunks.append(chunk)
            if each:
                each(chunk)
        if window.pending:
            assert changed.wait(60)
    return chunks


@pytest.mark.parametrize(
    ("size", "batch_size", "max_waiting", "each_round"),
    [(1, 1, 1, False), (2, 2, 1, True), (5, 2, 5, False), (40, 2, 1, False), (40, 3, 40, True)],
)
def test_no_more_than_its_size_is_ever_submitted(
    hash_engine: Any, monkeypatch: pytest.MonkeyPatch, size: int, batch_size: int, max_waiting: int, each_round: bool
) -> None:
    engine, changed, count = hash_engine(batch_size, max_waiting), threading.Event(), 23
    submissions, ended, open_ones = Submissions(engine, monkeypatch), list[int](), list[int]()
    sequences = sequences_of(engine, count)
    window = Window(engine.scheduler, sequences, size, changed.set, each_round)

    def note(chunk: Chunk) -> None:
        ended.append(chunk.index) if chunk.result else None
        open_ones.append(len(submissions.handles) - len(ended))

    chunks = drained(window, changed, note)
    assert max(open_ones) <= size
    assert max(submissions.overflow) <= 1, "no caller stands in line with more than one"
    assert max(submissions.waiting) <= max_waiting
    assert [handle.sequence for handle in submissions.handles] == sequences, "each once, in order"
    assert sorted(ended) == list(range(count))
    for sequence in sequences:
        tokens = [token for chunk in chunks if chunk.index == sequence.index for token in chunk.token_ids]
        assert (tokens, sequence.finish_reason, len(tokens)) == (sequence.output, "length", 6)
    at_rest(engine)


def test_it_fills_the_slots_the_queue_and_one_place_in_line(hash_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = hash_engine(batch_size=2, max_waiting=3, gated=True)
    submissions = Submissions(engine, monkeypatch)
    window = Window(engine.scheduler, sequences_of(engine, 20), 20, lambda: None, False)
    window.fill()
    scheduler = engine.scheduler
    assert (len(scheduler.active), len(scheduler.waiting), len(scheduler.overflow)) == (2, 3, 1)
    window.fill()
    assert list(window.chunks()) == [], "nothing is new, and nobody is waited for"
    assert len(submissions.handles) == 6
    submissions.handles[3].cancel()  # the place in the queue is the one's in line
    assert (len(scheduler.waiting), len(scheduler.overflow)) == (3, 0)
    (chunk,) = window.chunks()
    assert (chunk.index, chunk.result.finish_reason) == (3, "cancelled")
    assert (len(submissions.handles), len(scheduler.overflow)) == (7, 1)
    window.cancel()
    engine.gate.open()
    at_rest(engine)


def test_a_full_queue_is_said_and_nothing_is_lost(hash_engine: Any) -> None:
    """Who does not want to wait is refused for the first of its sequences, or not at all."""
    engine, changed = hash_engine(batch_size=1, max_waiting=1, gated=True), threading.Event()
    others = [engine.submit("ab", SHORT), engine.submit("cd", SHORT)]
    window = Window(engine.scheduler, sequences_of(engine, 4), 4, changed.set, False)
    for _ in range(2):
        with pytest.raises(QueueFullError, match="holds 1 requests and is full"):
            window.fill(wait=False)
        assert window.pending
        assert len(engine.scheduler.overflow) == 0
    others[1].cancel()
    window.fill(wait=False)
    assert (len(engine.scheduler.waiting), len(engine.scheduler.overflow)) == (1, 1)
    engine.gate.open()
    ends = [chunk.result.token_ids for chunk in drained(window, changed) if chunk.result]
    assert ends == [expected(hash_engine, [[i, 0]], SHORT) for i in range(4)]


@pytest.mark.parametrize("each_round", [False, True])
def test_it_is_woken_each_round_or_when_one_ends(hash_engine: Any, each_round: bool) -> None:
    engine, woken = hash_engine(), list[int]()
    params = SamplingParams(max_new_tokens=9, speculation="off")
    window = Window(engine.scheduler, sequences_of(engine, 1, params), 2, lambda: woken.append(1), each_round)
    window.fill()
    while window.pending:
        list(window.chunks())
    at_rest(engine)
    assert len(woken) == (10 if each_round else 2), "queued and ended; and the eight rounds before the last"


def test_cancelling_ends_what_runs_and_forgets_the_rest(hash_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, changed = hash_engine(batch_size=1, max_waiting=1, gated=True), threading.Event()
    submissions = Submissions(engine, monkeypatch)
    window = Window(engine.scheduler, sequences_of(engine, 9, LONG), 9, changed.set, False)
    window.fill()
    engine.gate.halted()
    engine.gate.step()
    window.cancel()
    window.cancel()
    assert (len(engine.scheduler.waiting), len(engine.scheduler.overflow)) == (0, 0)
    assert window.pending, "the results of those that were submitted are still to be read"
    engine.gate.open()
    ends = {chunk.index: chunk.result for chunk in drained(window, changed) if chunk.result}
    assert [(index, result.finish_reason) for index, result in sorted(ends.items())] == [
        (index, "cancelled") for index in range(3)
    ]
    assert ends[0].token_ids
    assert ends[1].token_ids == ends[2].token_ids == []
    assert len(submissions.handles) == 3
    at_rest(engine)


def test_other_callers_get_their_turn(hash_engine: Any) -> None:
    """Whoever comes while a window is full goes before what the window has not submitted yet."""
    engine, changed = hash_engine(batch_size=1, max_waiting=1, gated=True), threading.Event()
    sequences = sequences_of(engine, 8)
    window = Window(engine.scheduler, sequences, 8, changed.set, False)
    window.fill()
    (beside,), _ = engine.requests("ab", SHORT, "raise")
    handle = engine.scheduler.submit(beside)
    engine.gate.open()
    drained(window, changed)
    assert handle.result(60).finish_reason == "length"
    started = [sequence.metrics.started or 0.0 for sequence in sequences]
    assert started == sorted(started)
    assert started[2] < (beside.metrics.started or 0.0) < started[3]


def test_a_closed_scheduler_gives_every_sequence_its_result(hash_engine: Any) -> None:
    engine, changed = hash_engine(), threading.Event()
    window = Window(engine.scheduler, sequences_of(engine, 7), 2, changed.set, False)
    engine.close()
    chunks = drained(window, changed)
    assert [chunk.index for chunk in chunks] == list(range(7))
    assert {chunk.result.finish_reason for chunk in chunks if chunk.result} == {"cancelled"}


def test_closing_a_stream_cancels_the_rest(hash_engine: Any) -> None:
    engine = hash_engine(batch_size=2)
    stream = engine.stream([[i] for i in range(9)], LONG)
    next(stream)
    stream.close()
    at_rest(engine)
    assert engine.stats.emitted < 9 * 100


def test_an_interrupt_cancels_the_rest(hash_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = hash_engine(gated=True)
    first = engine.submit("ab", LONG)
    engine.gate.halted()
    first.cancel()

    def interrupt(event: threading.Event, timeout: float | None = None) -> bool:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return real(event, timeout)

    real = threading.Event.wait
    monkeypatch.setattr(threading.Event, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(["cd", "ef"], LONG)
    monkeypatch.undo()
    assert list(engine.scheduler.waiting) == []
    engine.gate.open()
    at_rest(engine)
    assert engine.stats.rounds == 1


def test_all_are_submitted_when_the_window_is_made(hash_engine: Any, clock: Any) -> None:
    """So times count from the call, however long its backlog waits in the window."""
    engine, changed = hash_engine(batch_size=1, gated=True, clock=clock), threading.Event()
    sequences = sequences_of(engine, 6)
    clock.now = 1.0
    window = Window(engine.scheduler, sequences, 2, changed.set, False)
    window.fill()
    engine.gate.halted()
    assert (engine.usage.running, engine.usage.waiting, engine.usage.to_come) == (1, 1, 4)
    clock.now = 5.0
    engine.gate.open()
    drained(window, changed)
    times = [sequence.metrics for sequence in sequences]
    assert [each.submitted for each in times] == [1.0] * 6
    assert [each.queue_time for each in times] == [0.0] + [4.0] * 5
    assert [each.ttft for each in times] == [4.0] * 6
    assert engine.usage.to_come == 0


def test_a_drain_does_not_wait_for_a_window_that_is_given_up(hash_engine: Any) -> None:
    engine, changed = hash_engine(batch_size=1, gated=True), threading.Event()
    window = Window(engine.scheduler, sequences_of(engine, 9), 2, changed.set, False)
    window.fill()
    engine.gate.halted()
    ended = list[bool]()
    draining = threading.Thread(target=lambda: ended.append(engine.drain(60)))
    draining.start()
    while not engine.scheduler.draining:
        pass
    window.cancel()
    window.cancel()
    assert engine.usage.to_come == 0
    engine.gate.open()
    draining.join(60)
    assert ended == [True]


def test_a_drain_is_held_up_by_a_stream_that_nobody_reads_until_its_time_is_over(hash_engine: Any) -> None:
    engine = hash_engine(batch_size=1)
    stream = engine.stream([[i] for i in range(9)], SHORT)
    first = next(stream)
    assert engine.drain(0.05) is False
    reasons = [chunk.result.finish_reason for chunk in (first, *stream) if chunk.result]
    assert len(reasons) == 9
    assert reasons[-1] == "cancelled", "every one has a result all the same"
