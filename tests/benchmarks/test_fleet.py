"""The fleet on paper: what is played is what was asked, and caches, slots and routing do what an engine's do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def fleet() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import fleet

        return fleet
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_one_request_takes_its_prompt_and_its_tokens(fleet: Any) -> None:
    played = fleet.Fleet(1, "prefix", fleet.Costs((0.5, 0.75), 0.25), shared=0)
    ended = []
    played.arrive(1.0, fleet.Turn(0, 0, 8, 4, 1.0))
    (done,) = played.run(lambda turn, now: ended.append(now))
    assert (done.cached, done.first, ended) == (0, 1 + 8 * 0.25 + 0.5, [1 + 8 * 0.25 + 4 * 0.5])


def test_two_at_once_slow_each_other_and_a_third_waits(fleet: Any) -> None:
    played = fleet.Fleet(1, "round robin", fleet.Costs((0.5, 1.0), 0.0), shared=0)
    ended = []
    for user in range(3):
        played.arrive(0.0, fleet.Turn(user, 0, 4, 4, 0.0))
    played.run(lambda turn, now: ended.append((turn.user, now)))
    assert ended == [(0, 4.0), (1, 4.0), (2, 6.0)]


def test_a_second_turn_finds_its_first_where_routing_goes_by_prefixes(fleet: Any) -> None:
    costs, habits = fleet.Costs((0.01, 0.01, 0.01, 0.01), 0.001), fleet.Habits(think=2.0)
    found = {way: fleet.play(4, 60, 200.0, way, costs, habits) for way in fleet.ROUTINGS}
    assert found["prefix"]["hit_rate"] > 1.2 * found["random"]["hit_rate"]
    assert all(each["requests"] > 100 for each in found.values())


def test_a_check_holds_what_was_simulated_beside_what_was_measured(fleet: Any) -> None:
    """Held against itself, with engines twice as slow and a tenth of a second outside of them, it is never off."""
    rows = [[user, turn, 50 + 60 * turn, 0] for user in range(12) for turn in range(4)]
    whole = {"engine": {"prompt": 0.001, "token": [[1, 0.01], [2, 0.012], [4, 0.016]]}, "random": {"rows": rows}}
    sys.path.insert(0, str(BENCHMARKS))
    try:
        for routing in ("random", "prefix"):
            played = [fleet.replayed(whole, routing, 2.0, 0.1, seed) for seed in range(fleet.SEEDS)]
            means = {name: sum(each[name] for each in played) / len(played) for name in played[0]}
            whole[routing] = {"rows": rows, "outside": 0.1} | means
        found = fleet.check(whole)
    finally:
        sys.path.remove(str(BENCHMARKS))
    assert found["slower"] == pytest.approx(2, rel=0.15)
    for routing in ("random", "prefix"):
        assert tuple(found[routing]) == ("hit_rate", "seconds_median", "seconds")
        assert all(abs(told["off_by"]) < 0.15 for told in found[routing].values()), found
    hits = {routing: found[routing]["hit_rate"]["simulated"] for routing in ("random", "prefix")}
    assert hits["prefix"] > hits["random"] > 0
