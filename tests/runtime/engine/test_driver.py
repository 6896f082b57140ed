"""The worker's side of a scheduler; what fails and hangs is in tests/attacks/test_engine_worker.py."""

from __future__ import annotations

from typing import Any

import pytest
from engine_checks import LONG, SHORT

from specbuild.runtime.engine.driver import look


@pytest.mark.parametrize(("timeout", "seconds"), [(None, 3600.0), (60.0, 15.0), (0.2, 0.05), (1e9, 3600.0)])
def test_how_often_a_worker_is_looked_at(timeout: float | None, seconds: float) -> None:
    assert look(timeout) == seconds


def test_a_worker_is_stuck_when_no_round_ends_in_time(hash_engine: Any, clock: Any) -> None:
    engine = hash_engine(gated=True, clock=clock)
    handle = engine.submit("ab", LONG)
    engine.gate.halted()
    for now, state in ((60.0, "running"), (60.5, "stuck")):
        clock.now = now
        assert engine.health().state == state
    engine.gate.step()
    assert engine.health().state == "running", "it goes on"
    clock.now = 200.0
    assert engine.health().state == "stuck"
    engine.gate.open()
    assert handle.result(60).finish_reason == "length"
    with engine.scheduler.exclusive():
        clock.now = 900.0
        assert engine.health().state == "exclusive", "whoever has the models may take as long as he likes"


def test_a_watchdog_tells_once_for_each_time(hash_engine: Any, clock: Any, logged: Any) -> None:
    engine = hash_engine(gated=True, clock=clock)
    handle, seen = engine.submit("ab", SHORT), list[int]()
    engine.gate.halted()
    for now in (10.0, 61.0, 62.0):
        clock.now = now
        engine.scheduler.watch()
        seen.append(len(logged()))
    engine.gate.step()
    engine.scheduler.watch()
    clock.now = 200.0
    engine.scheduler.watch()
    seen.append(len(logged()))
    assert seen == [0, 1, 1, 2]
    assert "no round has ended for 61 s (stall_timeout is 60): the worker is in " in logged()[0].getMessage()
    engine.gate.open()
    assert handle.result(60).finish_reason == "length"
