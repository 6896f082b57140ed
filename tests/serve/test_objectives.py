"""Objectives: how they are written, when they are broken, and which requests count."""

import random

import pytest

from specbuild.runtime import RequestMetrics
from specbuild.runtime.errors import OptionError
from specbuild.serve.slo.objectives import COUNT, SECONDS, Objective, Sample, Window, parse

P99, MEDIAN = Objective("ttft", 1.0, 0.99), Objective("ttft", 1.0, 0.5)


def test_how_they_are_written():
    for texts, found in (
        (["ttft=0.5,tpot=0.05,p99"], "ttft_p99 0.5 tpot_p99 0.05"),
        (["ttft=0.2,p50,ttft=1,e2el=9,p99.9"], "ttft_p50 0.2 ttft_p99.9 1 e2el_p99.9 9"),
        ([" tpot = 0.05 , p50, p95 "], "tpot_p50 0.05 tpot_p95 0.05"),
        (["ttft=1,p50,tpot=2", "ttft=2,p99"], "ttft_p50 1 tpot_p99 2 ttft_p99 2"),
    ):
        assert " ".join(f"{each.name} {each.seconds:g}" for each in parse(texts)) == found


WRONG = (
    "p99 ttft=1,p0 ttft=1,p100 ttft=fast ttft=0 ttft=inf tps=3 ttft ttft=1,ttft=2,p99 ttft=1,p99,ttft=2 {'ttft':0.5}"
)


@pytest.mark.parametrize("text", ["", *WRONG.split()])
def test_what_is_refused(text):
    with pytest.raises(OptionError) as refused:
        parse([text])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("objective", "fast", "slow", "sure", "broken"),
    [
        *((P99, fast, slow, True, False) for fast, slow in ((0, 0), (20, 1), (200, 3))),
        *((P99, fast, slow, True, True) for fast, slow in ((15, 3), (0, 2))),
        *((MEDIAN, 10, 15, True, False), (MEDIAN, 0, 10, True, True)),
        *((P99, 100, 3, False, True), (P99, 100, 2, False, False)),
    ],
)
def test_one_slow_request_breaks_nothing_and_too_many_do(objective, fast, slow, sure, broken):
    assert objective.broken([0.5] * fast + [9.0] * slow, sure=sure) == broken


def test_where_it_is_just_met_it_is_hardly_ever_broken():
    """Of 3,000 windows of 100 requests, each slow with a chance of 1 %: as many as ALPHA says."""
    drawn = random.Random(0)
    found = sum(P99.broken([2.0 * (drawn.random() < 0.01) for _ in range(100)]) for _ in range(3000))
    assert found <= 8


@pytest.mark.parametrize(("count", "tail"), [(0, None), (1, 0), (7, 6), (8, 6), (1000, 990)])
def test_a_tail_is_robust(count, tail):
    """A few outliers are not the tail, unless there is nothing else."""
    assert P99.tail([float(each) for each in range(count)]) == tail


def test_a_sample_has_its_times():
    def sample(**own):
        times = {"submitted": 1.0, "started": 2.0, "first_token": 4.0, "finished": 10.0, "num_output_tokens": 4}
        return Sample.of(RequestMetrics(3, 1, "auto", **times | own))

    assert (found := sample())
    assert [*map(found.time, ("ttft", "tpot", "e2el")), found.queue] == [3.0, 2.0, 9.0, 1.0]
    assert (one := sample(num_output_tokens=1))
    assert one.tpot is sample(first_token=None) is None


def test_a_window_may_grow_while_another_thread_reads_it():
    window = Window(lambda: 100.0)

    class Adding(float):
        def __ge__(self, other):
            window.add(Sample(90.0, 90.0, 95.0, 1.0, 0.0, None))
            return True

    for _ in range(2):
        window.add(Sample(90.0, 90.0, Adding(95.0), 1.0, 0.0, None))
    assert window.times(P99) == [1.0, 1.0]


def test_a_window_has_the_latest_that_began_in_time():
    tpot, now = Objective("tpot", 1.0, 0.99), 100.0
    window = Window(lambda: now)
    for submitted, started, finished in ((60.0, 61.0, 69.9), (80.0, 85.0, 90.0), (86.0, 87.0, 99.0)):
        window.add(Sample(submitted, started, finished, finished, 0.0, finished))
    assert window.times(P99) == [90.0, 99.0], f"older than {SECONDS:g} s"
    assert window.times(tpot, since=84.0) == [90.0, 99.0], "decoded since then"
    assert window.times(P99, since=84.0) == [99.0], "came since then"
    for _ in range(2 * COUNT):
        window.add(Sample(90.0, 90.0, 95.0, 1.0, 0.0, None))
    assert (len(window.times(P99)), window.times(tpot)) == (COUNT, [])
    assert (P99.attainment([1.0, 1.0, 2.0, 0.5]), P99.attainment([])) == (0.75, 1.0)
