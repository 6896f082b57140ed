"""A window keeps no more than its size submitted, one of them at most in line for room, until all have ended."""

import threading

import pytest
from engine_checks import LONG, SHORT, at_rest

from specbuild.runtime import Chunk
from specbuild.runtime.engine.window import Window


def sequences_of(engine, count, params=SHORT):
    sequences, _ = engine.requests([[i % 9, i // 9] for i in range(count)], params, "raise")
    return list(sequences)


def drained(window, changed, each=lambda chunk: None):
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
def test_no_more_than_its_size_is_ever_submitted(hash_engine, size, batch_size, max_waiting, each_round):
    engine, changed, count = hash_engine(batch_size, max_waiting), threading.Event(), 23
    sequences = sequences_of(engine, count)
    window = Window(engine.scheduler, sequences, size, changed.set, each_round)

    def note(chunk):
        usage = engine.usage
        assert usage.running + usage.waiting <= size
        assert len(engine.scheduler.overflow) <= 1, "no caller stands in line with more than one"

    chunks = drained(window, changed, note)
    started = [sequence.metrics.started or 0.0 for sequence in sequences]
    assert started == sorted(started) != [0.0] * count
    assert sorted(chunk.index for chunk in chunks if chunk.result) == list(range(count)), "each once"
    for sequence in sequences:
        tokens = [token for chunk in chunks if chunk.index == sequence.request.index for token in chunk.token_ids]
        assert (tokens, sequence.finish_reason, len(tokens)) == (sequence.output, "length", 6)
    at_rest(engine)


def queued(engine):
    """How many have slots, are in the queue, and stand in line for it."""
    return len(engine.scheduler.active), len(engine.scheduler.waiting), len(engine.scheduler.overflow)


def test_it_fills_the_slots_the_queue_and_one_place_in_line(hash_engine):
    engine = hash_engine(batch_size=2, max_waiting=3, gated=True)
    window = Window(engine.scheduler, sequences_of(engine, 20), 20, lambda: None, False)
    for _ in range(2):
        window.fill()
        assert queued(engine) == (2, 3, 1)
    assert list(window.chunks()) == [], "nothing is new, and nobody is waited for"
    list(engine.scheduler.waiting)[1].cancel()
    assert queued(engine) == (2, 3, 0), "its place in the queue is the one's in line"
    (chunk,) = window.chunks()
    assert (chunk.index, chunk.result.finish_reason) == (3, "cancelled")
    assert queued(engine) == (2, 3, 1)
    window.cancel()
    engine.gate.open()
    at_rest(engine)


def test_other_callers_get_their_turn(hash_engine):
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


def test_a_closed_scheduler_gives_every_sequence_its_result(hash_engine):
    engine, changed = hash_engine(), threading.Event()
    window = Window(engine.scheduler, sequences_of(engine, 7), 2, changed.set, False)
    engine.close()
    chunks = drained(window, changed)
    assert [chunk.index for chunk in chunks] == list(range(7))
    assert {chunk.result.finish_reason for chunk in chunks if chunk.result} == {"cancelled"}


def test_an_interrupt_or_a_stream_that_is_left_cancels_the_rest(hash_engine, monkeypatch):
    engine = hash_engine(gated=True)
    first = engine.submit("ab", LONG)
    engine.gate.halted()
    first.cancel()

    def interrupt(event, timeout=None):
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return real(event, timeout)

    real = threading.Event.wait
    monkeypatch.setattr(threading.Event, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(["cd", "ef"], LONG)
    monkeypatch.undo()
    engine.gate.open()
    at_rest(engine)
    assert engine.stats.rounds == 1
    stream = engine.stream([[i] for i in range(9)], LONG)
    next(stream)
    stream.close()
    at_rest(engine)
    assert engine.stats.emitted < 9 * 100


def test_all_are_submitted_when_the_window_is_made(hash_engine, clock):
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
    times = [(sequence.metrics.submitted, sequence.metrics.queue_time, sequence.metrics.ttft) for sequence in sequences]
    assert times == [(1.0, 0.0, 4.0)] + [(1.0, 4.0, 4.0)] * 5
    assert engine.usage.to_come == 0


def test_a_drain_does_not_wait_for_a_window_that_is_given_up(hash_engine):
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


def test_a_drain_is_held_up_by_a_stream_that_nobody_reads_until_its_time_is_over(hash_engine):
    engine = hash_engine(batch_size=1)
    stream = engine.stream([[i] for i in range(9)], SHORT)
    first = next(stream)
    assert engine.drain(0.05) is False
    reasons = [chunk.result.finish_reason for chunk in (first, *stream) if chunk.result]
    assert len(reasons) == 9
    assert reasons[-1] == "cancelled", "every one has a result all the same"
