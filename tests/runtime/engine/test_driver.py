"""The worker's side of a scheduler; what fails and hangs is in tests/attacks/test_engine_worker.py."""

import threading
import time
from dataclasses import replace

import pytest
from engine_checks import LONG, SHORT, at_rest, expected


def test_a_worker_is_stuck_when_no_round_ends_in_time(hash_engine, clock, logged):
    """A watchdog tells once for each time; whoever has the models may take as long as he likes."""
    engine = hash_engine(gated=True, clock=clock)
    handle = engine.submit("ab", SHORT)
    engine.gate.halted()

    def at(now):
        clock.now = now
        engine.scheduler.watch()
        return engine.health().state, len(logged())

    assert [at(60.0), at(61.0), at(62.0)] == [("running", 0), ("stuck", 1), ("stuck", 1)]
    engine.gate.step()
    assert [at(62.0), at(200.0)] == [("running", 1), ("stuck", 2)]
    assert "no round has ended for 61 s (stall_timeout is 60): the worker is in " in logged()[0].getMessage()
    engine.gate.open()
    assert handle.result(60).finish_reason == "length"
    with engine.scheduler.exclusive():
        assert at(900.0) == ("exclusive", 2)


BACKGROUND = replace(LONG, background=True)


def test_background_ends_before_the_next_round_when_somebody_comes(hash_engine):
    engine = hash_engine(batch_size=2, gated=True)
    behind = engine.submit("ab", BACKGROUND)
    engine.gate.halted()
    engine.gate.step()  # alone it decodes, round after round
    engine.gate.step()
    before = engine.submit("cd", SHORT)
    engine.gate.step()
    assert behind.done, "one round was under way, and no other began"
    assert [handle.sequence.tokens[:2] for handle in engine.scheduler.active] == [[2, 3]]
    engine.gate.open()
    result = behind.result()
    assert (result.finish_reason, result.metrics.background) == ("cancelled", True)
    assert result.token_ids == expected(hash_engine, "ab")[: len(result.token_ids)] != []
    assert before.result().token_ids == expected(hash_engine, "cd", SHORT)
    assert not before.result().metrics.background
    at_rest(engine)


def test_background_alone_is_decoded_to_its_end(hash_engine):
    results = hash_engine(batch_size=2).generate(["ab", "cd", "ef"], BACKGROUND)
    assert [result.token_ids for result in results] == [expected(hash_engine, each) for each in ("ab", "cd", "ef")]


def test_background_never_starts_where_others_run_wait_or_are_promised(hash_engine):
    engine = hash_engine(batch_size=2, gated=True)
    running = engine.submit("ab", SHORT)
    engine.gate.halted()
    behind = engine.submit("cd", BACKGROUND)
    engine.gate.step()
    assert (behind.done, behind.result(0).token_ids) == (True, [])
    assert behind.result(0).metrics.started is None
    engine.gate.open()
    assert running.result().finish_reason == "length"
    ((promised,), _) = engine.requests("ef", SHORT, "raise")
    engine.scheduler.promise([promised])
    assert engine.submit("gh", BACKGROUND).result(60).finish_reason == "cancelled"
    engine.scheduler.withdraw([promised])
    assert engine.submit("gh", BACKGROUND).result(60).finish_reason == "length"
    at_rest(engine)


def test_background_holds_up_no_full_queue(hash_engine):
    engine = hash_engine(batch_size=1, max_waiting=1, gated=True)
    behind = [engine.submit("ab", BACKGROUND)]
    engine.gate.halted()
    behind.append(engine.submit("cd", BACKGROUND))  # the queue is full
    ((sequence,), _) = engine.requests("ef", SHORT, "raise")
    before = engine.scheduler.submit(sequence)
    engine.gate.open()
    assert before.result(60).finish_reason == "length"
    assert [handle.result(60).finish_reason for handle in behind] == ["cancelled"] * 2


@pytest.mark.parametrize("wait", [at_rest, lambda engine: engine.drain()])
def test_background_holds_up_no_exclusive_section_and_no_drain(hash_engine, wait):
    engine = hash_engine(gated=True)
    behind = engine.submit("ab", BACKGROUND)
    engine.gate.halted()
    waiting = threading.Thread(target=wait, args=(engine,))
    waiting.start()
    while not (engine.scheduler.draining or engine.scheduler.exclusive_sections):
        time.sleep(1e-3)
    engine.gate.open()
    assert behind.result(60).finish_reason == "cancelled"
    waiting.join(60)
    assert not waiting.is_alive()
