"""The simulator: what a policy decides costs and brings what was recorded."""

from __future__ import annotations

from typing import Any

import pytest

from specbuild.measure.simulate import Outcome, Position, Simulator, busy, positions, quiet
from specbuild.runtime.speculation.lead import LEEWAY
from specbuild.runtime.speculation.timings import TimingTable

TIMES = {"verify": [[1, 10.0], [64, 60.0]], "draft": [[1, 0.5], [64, 2.0]], "plain": 0.4, "round": 0.4, "level": 0.1}
CHANCES = {
    "likely": [-1.0, 0.0],
    "chance": [0.4, 0.9],
    "step": 0.7,
    "reach": [0, 0.7, 1.2, 1.5, 1.7, 1.8, 1.9, 1.95, 2.0],
    "lookup": [0.0, 0.3, 0.5, 0.6, 0.7, 0.75],
}


def table_of(times: dict[str, Any] = TIMES) -> TimingTable:
    record = {"schema": 2, "machine": {}, "widest": "best:16", "times": {"1": times, "4": times}}
    return TimingTable.of(record | {"chances": {"greedy": CHANCES, "sampled": CHANCES}}, 64)


LOOP = [Position(12, 24, 0)] * 200
FRESH = [Position(0, 0, 0)] * 200
GOOD = [Position(0, 0, 4)] * 200


def test_positions_say_what_would_come_true() -> None:
    tokens = [1, 2, 3, 9, 1, 2, 3, 9, 1, 5]
    found = positions(tokens, 4, model=[3, 0, 1])
    assert len(found) == 6
    assert (found[0].matched, found[0].model) == (0, 3)
    assert found[1] == Position(1, 4, 0)
    assert found[4] == Position(4, 1, 0), "9 is followed by 1 as before, and then by something else"
    assert found[-1].text == 0


@pytest.mark.parametrize("lanes", [1, 4])
def test_what_repeats_itself_is_fast_and_what_does_not_is_plain(lanes: int) -> None:
    fast = Simulator(table_of(), lanes).run([LOOP], False, 0.0, 60)
    assert fast.speedup > 2
    assert fast.tokens > 5 * lanes * fast.rounds
    none = Simulator(table_of(), lanes).run([FRESH], False, 0.0, 100)
    assert none.speedup == pytest.approx(1.0)
    assert set(none.decisions) == {"plain"}
    model = Simulator(table_of(), lanes).run([GOOD], True, 0.8, 100)
    assert model.speedup > 1.3
    assert model.decisions["model"] > 50


def test_a_draft_that_brings_nothing_is_left() -> None:
    found = Simulator(table_of(), 4).run([FRESH], True, 0.0, 300)
    assert found.speedup > 0.97


def test_a_machine_that_turns_busy_is_left_with_live_timings_and_not_by_the_table() -> None:
    """From round 50 on a row costs as much again as a whole step did."""
    dear = busy(1.0, since=50)
    live, table = (Simulator(table_of(), 1, dear, live).run([GOOD], True, 0.0, 400) for live in (True, False))
    assert live.speedup > 0.97
    assert live.speedup > 1.02 * table.speedup


def test_texts_that_repeat_themselves_hardly_slow_those_that_do_not() -> None:
    """And are decoded faster themselves; a text that nobody slows takes as long as by plain decoding."""
    steep = table_of(TIMES | {"verify": [[1, 10.0], [64, 100.0]]})
    found = Simulator(steep, 4).run([LOOP, FRESH, LOOP, FRESH], False, 0.0, 400)
    assert len(found.slowdowns) > 8
    assert min(found.slowdowns) < 0.9
    assert found.slowest < 1 + 2 * LEEWAY
    none = Simulator(steep, 4).run([FRESH], False, 0.0, 200)
    assert none.slowest == pytest.approx(1.0)
    assert Outcome().slowest == 1.0


def test_a_noisy_machine_is_no_reason_to_be_slower() -> None:
    found = Simulator(table_of(), 4, busy(0.0, noise=0.2)).run([LOOP, FRESH, GOOD], True, 0.0, 300)
    assert found.speedup > 1.05, "those that do not repeat themselves are spared"
    found = Simulator(table_of(), 4, busy(0.0, noise=0.2)).run([LOOP, GOOD], True, 0.0, 300)
    assert found.speedup > 1.2
    assert quiet("verify", 3, 2.0, 0) == 2.0
    assert Outcome(seconds=2.0, plain=3.0).speedup == 1.5
