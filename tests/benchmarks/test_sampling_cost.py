"""The cost of sampling: what becomes of measured texts."""

from __future__ import annotations

import pytest

from benchmarks import sampling_cost
from benchmarks.sampling_cost import WAYS, Measured


def run(sampled: float, accept: float, token: int = 5) -> Measured:
    of = {name: (0.010, 0.0001) if name == "greedy" else (sampled, accept) for name in WAYS}
    return {
        name: [{"token": t, "rounds": [(t, a)] * 9, "tokens": [1, token], "alone": a}] * 2
        for name, (t, a) in of.items()
    }


def test_a_way_is_held_against_greedy_texts_by_the_clock_and_by_accepting() -> None:
    row = sampling_cost.plain([run(0.012, 0.0011)] * 3, [run(0.0103, 0.0003)] * 3)["temperature 0.8"]
    assert row["old"] == {
        "texts over greedy": 1.2,
        "rounds over greedy": 1.2,
        "accepting over greedy rounds": 1.1,
        "round ms": 12.0,
        "accept us": 1100.0,
        "choice alone us": 1100.0,
        "quickest greedy round ms": 10.0,
        "choice alone over quickest greedy round": 1.1,
    }
    assert (row["new"]["texts over greedy"], row["new"]["accepting over greedy rounds"]) == (1.03, 1.02)


def test_what_sampling_keeps_of_a_speedup_is_a_ratio_of_two() -> None:
    times = {
        "greedy, off": 0.010,
        "greedy, auto": 0.005,
        "temperature 0.8, off": 0.010,
        "temperature 0.8, auto": 0.00625,
    }
    found = sampling_cost.kept([{name: [{"token": seconds}] for name, seconds in times.items()}])
    assert found == {"greedy": 2.0, "temperature 0.8": 1.6, "kept": 0.8}


@pytest.mark.parametrize(("token", "texts"), [(5, 0), (6, 2 * len(WAYS))])
def test_texts_that_differ_are_counted(token: int, texts: int) -> None:
    assert sampling_cost.differing([run(1, 1)], [run(2, 2, token)]) == texts
