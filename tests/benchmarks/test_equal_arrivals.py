"""Requests arrive when they are told to, the same for both ways, and a cell says how their times compare."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from specbuild.runtime import SamplingParams


def test_times_of_one_way_over_those_of_the_other(benchmark: Any) -> None:
    loads = [
        [{"off": [(1.0, 3.0), (2.0, 1.0)], "auto": [(0.5, 3.0), (4.0, 1.0)]}],
        [{"off": [(1.0, 1.0)], "auto": [(0.5, 4.0)]}],
    ]
    found = benchmark.summary(loads)
    assert found["tpot_mean"] == pytest.approx(5 / 4)
    assert (found["tpot_p50"], found["tpot_p99"]) == (0.5, 2.0)
    assert (found["ttft_mean"], found["ttft_p99"]) == (pytest.approx(8 / 5), pytest.approx(4 / 3))
    for name in ("tpot_mean", "tpot_p99", "ttft_mean", "ttft_p99"):
        low, high = found[f"{name}_interval"]
        assert low <= found[name] <= high
    assert found["tpot_mean_interval"] == pytest.approx([0.5, 1.5])


def test_requests_arrive_when_they_are_told(benchmark: Any) -> None:
    came = list[float]()

    class Engine:
        def submit(self, text: str, params: SamplingParams) -> Any:
            came.append(time.perf_counter() - began)
            return SimpleNamespace(result=lambda: (text, params.seed))

    began = time.perf_counter()
    given = [SamplingParams(seed=number) for number in range(3)]
    assert benchmark.serve(Engine(), ["a", "b", "c"], given, [0.0, 0.02, 0.01]) == [("a", 0), ("b", 1), ("c", 2)]
    assert came[1] >= 0.02
    assert came == sorted(came)


def test_capacity_is_of_full_slots(benchmark: Any) -> None:
    """Of six requests of a second on two slots, also if they are of unlike lengths and one slot is empty at the end."""
    for seconds in ([1.0] * 6, [1.0, 0.5, 1.5, 1.0, 0.5, 1.5]):
        free, came = [0.0, 0.0], list[Any]()
        for each in seconds:
            free.sort()
            free[0] += each
            came.append(SimpleNamespace(metrics=SimpleNamespace(submitted=5.0, finished=5.0 + free[0])))
        engine = SimpleNamespace(submit=lambda text, params, came=came: SimpleNamespace(result=lambda: came.pop(0)))
        found = benchmark.capacity(engine, ["a"] * 6, [SamplingParams()] * 6, 2)
        assert found == pytest.approx(2.0, rel=0.15)
