"""Metrics: vLLM's counts and times by hand."""

from __future__ import annotations

import json

import pytest

from specbuild.runtime.requests.metrics import RequestMetrics, RunStats, SpeculationStats


def recorded(*rounds: tuple[int, ...]) -> SpeculationStats:
    stats = SpeculationStats()
    for each in rounds:
        stats.record(*each)
    return stats


def test_counts_of_rounds() -> None:
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
        "num_unsettled_steps": 0,
        "num_recomputed_tokens": 0,
        "decisions": {"plain": 2, "model": 2},
    }
    assert stats.depth_histogram == recorded(*first, *second).depth_histogram == [0, 1, 0, 2]
    assert fresh == SpeculationStats()
    assert (fresh.mean_acceptance_length, fresh.draft_acceptance_rate, fresh.acceptance_histogram) == (1, 0, [])


def test_request_times() -> None:
    """From submission; and JSON has no times of a clock that nobody else has."""
    times = {"submitted": 10.0, "started": 10.25, "first_token": 10.5, "finished": 12.5}
    metrics = RequestMetrics(7, 42, "chain:4", num_output_tokens=5, **times)  # type: ignore[arg-type]
    assert (metrics.queue_time, metrics.ttft, metrics.e2el, metrics.tpot) == (0.25, 0.5, 2.5, 0.5)
    assert RequestMetrics(7, 42, "off", num_output_tokens=1, first_token=0.5, finished=0.5).tpot == 0
    assert RequestMetrics(7, 42, "off").tpot == 0
    assert not set(times) & set(metrics.to_dict())
    shown = json.loads(json.dumps(metrics.to_dict()))
    assert shown["speculative_decoding"] == SpeculationStats().to_dict()
    assert {key: shown[key] for key in ("queue_time", "ttft", "tpot", "e2el", "seed", "speculation")} == {
        "queue_time": 0.25,
        "ttft": 0.5,
        "tpot": 0.5,
        "e2el": 2.5,
        "seed": 42,
        "speculation": "chain:4",
    }
    assert (shown["num_prompt_tokens"], shown["num_output_tokens"]) == (7, 5)


def test_what_never_started_waited_until_its_end() -> None:
    waited = RequestMetrics(7, 42, "off", submitted=0.0, finished=3.0)
    assert (waited.queue_time, waited.ttft, waited.e2el, waited.tpot) == (3.0, 0.0, 3.0, 0.0)
    refused = RequestMetrics(7, 42, "off")
    assert (refused.queue_time, refused.ttft, refused.e2el) == (0.0, 0.0, 0.0)


def test_run_time_is_split_into_models_and_loop() -> None:
    stats = RunStats(rounds=2, total=10.0, draft=3.0, verify=5.0, accept=0.75, commit=0.25)
    assert stats.loop == pytest.approx(2.0)
    assert stats.loop_share == pytest.approx(0.2)
    assert RunStats().loop_share == 0
    assert stats.host == stats.to_dict()["host_s"] == pytest.approx(1.0)


def test_runs_together_and_what_one_of_them_added() -> None:
    one, other = RunStats(1, 2, 3.0, 1.0, 1.5, 0.25, 0.125), RunStats(4, 9, 8.0, 2.0, 4.5, 1.25, 0.375)
    both = RunStats.sum([one, other])
    assert (both, both.since(one)) == (RunStats(5, 11, 11.0, 3.0, 6.0, 1.5, 0.5), other)
