"""Metrics: vLLM's counts and times by hand."""

from __future__ import annotations

import dataclasses
import json

import pytest

from specbuild.runtime.requests.metrics import RequestMetrics, RunStats, SpeculationStats


def recorded(*rounds: tuple[int, ...]) -> SpeculationStats:
    stats = SpeculationStats()
    for each in rounds:
        stats.record(*each)
    return stats


def test_counts_of_rounds() -> None:
    stats = recorded((4, 2), (4, 0), (4, 4), (3, 2))
    assert stats.to_dict() == {
        "mean_acceptance_length": 3.0,
        "draft_acceptance_rate": 8 / 15,
        "acceptance_histogram": [1, 0, 2, 0, 1],
        "num_spec_steps": 4,
        "num_draft_tokens": 15,
        "num_accepted_draft_tokens": 8,
        "num_unsettled_steps": 0,
        "num_recomputed_tokens": 0,
        "decisions": {},
    }


def test_nothing_drafted() -> None:
    stats = SpeculationStats()
    assert (stats.mean_acceptance_length, stats.draft_acceptance_rate, stats.acceptance_histogram) == (1, 0, [])


def test_merge_is_recording_both() -> None:
    first, second = ((4, 2, 2), (4, 0, 3)), ((5, 5, 5), (1, 1, 1))
    for left, right in ((first, second), (second, first)):
        merged = recorded(*left)
        merged.merge(recorded(*right))
        assert merged == recorded(*left, *right)


def test_levels_of_trees_are_counted_where_they_are_known() -> None:
    assert recorded((4, 2, 3), (4, 0, 1), (4, 1, 3)).depth_histogram == [0, 1, 0, 2]
    assert recorded((4, 2)).depth_histogram == []


def test_two_requests_share_no_histogram() -> None:
    first, second = RequestMetrics(1, 0, "off"), RequestMetrics(1, 0, "off")
    first.speculative_decoding.record(1, 1)
    assert second.speculative_decoding == SpeculationStats()


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


def test_runs_together() -> None:
    one, other = RunStats(1, 2, 3.0, 1.0, 1.5, 0.25, 0.125), RunStats(4, 9, 8.0, 2.0, 4.5, 1.25, 0.375)
    assert RunStats.sum([one, other]) == RunStats(5, 11, 11.0, 3.0, 6.0, 1.5, 0.5)
    assert RunStats.sum([]) == RunStats()


def test_a_part_of_a_run_is_what_was_added() -> None:
    before, now = RunStats(1, 2, 3.0, 1.0, 1.5, 0.25, 0.125), RunStats(4, 9, 8.0, 2.0, 4.5, 1.25, 0.375)
    assert now.since(before) == RunStats(3, 7, 5.0, 1.0, 3.0, 1.0, 0.25)


def test_decisions_are_counted_added_and_copied_as_plain_data() -> None:
    one, other = SpeculationStats(), SpeculationStats()
    for kind in ("plain", "plain", "model"):
        one.decide(kind)
    other.decide("model")
    one.merge(other)
    assert dataclasses.asdict(one)["decisions"] == one.to_dict()["decisions"] == {"plain": 2, "model": 2}
    assert one.promised == 4.0
