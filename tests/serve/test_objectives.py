"""Objectives: how they are written, when they are broken, and which requests count."""

from __future__ import annotations

import random
from typing import Any

import pytest

from specbuild.runtime import RequestMetrics
from specbuild.runtime.errors import OptionError
from specbuild.serve.objectives import COUNT, SECONDS, Objective, Sample, Window, parse


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        ([], {}),
        (["ttft=0.5,tpot=0.05,p99"], {"ttft_p99": 0.5, "tpot_p99": 0.05}),
        (["ttft=0.5"], {"ttft_p99": 0.5}),
        (["ttft=0.2,p50,ttft=1,e2el=9,p99.9"], {"ttft_p50": 0.2, "ttft_p99.9": 1, "e2el_p99.9": 9}),
        ([" tpot = 0.05 , p50, p95 "], {"tpot_p50": 0.05, "tpot_p95": 0.05}),
        (["ttft=1,p50,tpot=2"], {"ttft_p50": 1, "tpot_p99": 2}),
        (["ttft=1,p50", "ttft=2,p99"], {"ttft_p50": 1, "ttft_p99": 2}),
    ],
)
def test_how_they_are_written(texts: list[str], found: dict[str, float]) -> None:
    assert {each.name: each.seconds for each in parse(texts)} == found


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ([""], "has no time"),
        (["p99"], "p99 is of no time before it"),
        (["ttft=1,p0"], "p0 is of no time"),
        (["ttft=1,p100"], "'p100' is no time and no percentile"),
        (["ttft=fast"], "'ttft=fast' is no time"),
        (["ttft=0"], "'ttft=0' is no time"),
        (["ttft=inf"], "'ttft=inf' is no time"),
        (["tps=3"], "'tps=3' is no time"),
        (["ttft"], "'ttft' is no time"),
        (["ttft=1,ttft=2,p99"], "two times for one percentile"),
        (["ttft=1", "ttft=2"], "two times for one percentile"),
        (["{'ttft': 0.5}"], "is no time"),
    ],
)
def test_what_is_refused(texts: list[str], words: str) -> None:
    with pytest.raises(OptionError, match=words) as refused:
        parse(texts)
    assert "\n" not in str(refused.value)


def test_one_slow_request_breaks_nothing_and_too_many_do() -> None:
    p99 = Objective("ttft", 1.0, 0.99)
    assert not p99.broken([])
    assert not p99.broken([0.5] * 20 + [9.0])
    assert not p99.broken([0.5] * 200 + [9.0] * 3)
    assert p99.broken([0.5] * 15 + [9.0] * 3)
    assert p99.broken([9.0] * 2)
    median = Objective("ttft", 1.0, 0.5)
    assert not median.broken([0.5] * 10 + [9.0] * 15)
    assert median.broken([9.0] * 10)
    assert p99.broken([0.5] * 100 + [9.0] * 3, sure=False)
    assert not p99.broken([0.5] * 100 + [9.0] * 2, sure=False)


def test_where_it_is_just_met_it_is_hardly_ever_broken() -> None:
    """Of 3,000 windows of 100 requests, each slow with a chance of 1 %: as many as ALPHA says."""
    drawn, objective = random.Random(0), Objective("tpot", 1.0, 0.99)
    found = sum(objective.broken([2.0 * (drawn.random() < 0.01) for _ in range(100)]) for _ in range(3000))
    assert found <= 8


@pytest.mark.parametrize(("count", "tail"), [(0, None), (1, 0), (7, 6), (8, 6), (100, 97), (300, 297), (1000, 990)])
def test_a_tail_is_robust(count: int, tail: float | None) -> None:
    """A few outliers are not the tail, unless there is nothing else."""
    assert Objective("ttft", 1.0, 0.99).tail([float(each) for each in range(count)]) == tail


def metrics(**own: Any) -> RequestMetrics:
    times = {"submitted": 1.0, "started": 2.0, "first_token": 4.0, "finished": 10.0, "num_output_tokens": 4}
    return RequestMetrics(3, 1, "auto", **times | own)


def test_a_sample_has_its_times() -> None:
    sample = Sample.of(metrics())
    assert sample
    assert [sample.time(each) for each in ("ttft", "tpot", "e2el")] == [3.0, 2.0, 9.0]
    assert sample.queue == 1.0
    one = Sample.of(metrics(num_output_tokens=1))
    assert one
    assert one.tpot is None
    assert Sample.of(metrics(first_token=None)) is None


def test_a_window_has_the_latest_that_began_in_time() -> None:
    now = 100.0
    window, ttft, tpot = Window(lambda: now), Objective("ttft", 1.0, 0.99), Objective("tpot", 1.0, 0.99)
    for submitted, started, finished in ((60.0, 61.0, 69.9), (80.0, 85.0, 90.0), (86.0, 87.0, 99.0)):
        window.add(Sample(submitted, started, finished, finished, 0.0, finished))
    assert window.times(ttft) == [90.0, 99.0], f"older than {SECONDS:g} s"
    assert window.times(tpot, since=84.0) == [90.0, 99.0], "decoded since then"
    assert window.times(ttft, since=84.0) == [99.0], "came since then"
    for _ in range(2 * COUNT):
        window.add(Sample(90.0, 90.0, 95.0, 1.0, 0.0, None))
    assert len(window.times(ttft)) == COUNT
    assert window.times(tpot) == []
    assert (ttft.attainment([1.0, 1.0, 2.0, 0.5]), ttft.attainment([])) == (0.75, 1.0)
