"""Metrics: vLLM's counts and times by hand."""

import json

import pytest

from specbuild.runtime.requests.metrics import RequestMetrics, RunStats, SpeculationStats


def recorded(*rounds):
    stats = SpeculationStats()
    for each in rounds:
        stats.record(*each)
    return stats


def test_counts_of_rounds():
    """Those of two requests together are what one would have counted."""
    first, second = ((4, 2, 3), (4, 0, 1)), ((4, 4, 3), (3, 2))
    stats, other, fresh = recorded(*first), recorded(*second), RequestMetrics(1, 0, "off").speculative_decoding
    for kind in ("plain", "plain", "model"):
        stats.decide(kind)
    other.decide("model")
    stats.merge(other)
    assert stats.to_dict() == {
        "mean_acceptance_length": 3.0,
        "draft_acceptance_rate": 8 / 15,
        "acceptance_histogram": [1, 0, 2, 0, 1],
        "num_spec_steps": 4,
        "num_draft_tokens": 15,
        "num_accepted_draft_tokens": 8,
        "decisions": {"plain": 2, "model": 2},
    }
    assert stats.depth_histogram == recorded(*first, *second).depth_histogram == [0, 1, 0, 2]
    assert fresh == SpeculationStats()
    assert (fresh.mean_acceptance_length, fresh.draft_acceptance_rate, fresh.acceptance_histogram) == (1, 0, [])


@pytest.mark.parametrize(
    ("counts", "clock", "times"),
    [
        (5, (10.0, 10.25, 10.5, 12.5), [0.25, 0.5, 0.5, 2.5]),
        (1, (0.0, 0.0, 0.5, 0.5), [0.0, 0.5, None, 0.5]),
        (0, (0.0, None, None, 3.0), [3.0, None, None, 3.0]),  # what never started waited until its end
    ],
)
def test_request_times(counts, clock, times):
    """From submission; and JSON has no times of a clock that nobody else has."""
    metrics = RequestMetrics(7, 42, "off", counts)
    metrics.submitted, metrics.started, metrics.first_token, metrics.finished = clock
    shown = json.loads(json.dumps(metrics.to_dict()))
    assert [shown[name] for name in ("queue_time", "ttft", "tpot", "e2el")] == times
    assert not {"submitted", "started", "first_token", "finished"} & shown.keys()
    assert shown["speculative_decoding"] == SpeculationStats().to_dict()


def test_runs_together_and_what_one_of_them_added():
    """Time is split into models, loop and host."""
    one, other = RunStats(1, 2, 3.0, 1.0, 1.5, 0.25, 0.125), RunStats(4, 9, 8.0, 2.0, 4.5, 1.25, 0.375)
    both = RunStats.sum([one, other])
    assert (both, both.since(one)) == (RunStats(5, 11, 11.0, 3.0, 6.0, 1.5, 0.5), other)
    assert (both.loop, both.loop_share, RunStats().loop_share) == (2.0, 2.0 / 11.0, 0)
    assert both.host == both.to_dict()["host_s"] == 0.0
