"""Metrics: vLLM's names, and what requests put into them."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from specbuild.runtime import Engine, RequestMetrics, Result, SpeculationStats
from specbuild.serve.metrics import Metrics


def samples(metrics: Metrics) -> dict[tuple[str, str], float]:
    """By name and the label beside the model's; buckets apart."""
    found = {}
    for family in text_string_to_metric_families(metrics.render()[0].decode()):
        for each in family.samples:
            labels = [value for name, value in each.labels.items() if name not in ("model_name", "le")]
            if not each.name.endswith(("_bucket", "_created")):
                found[each.name, labels[0] if labels else ""] = each.value
    return found


def result(reason: str = "stop", **own: Any) -> Result:
    stats = SpeculationStats()
    for accepted in (0, 2, 3):
        stats.record(4, accepted)
    stats.decide("model", 1.75)
    stats.num_unsettled_steps, stats.num_recomputed_tokens = 1, 2
    told: dict[str, Any] = {"submitted": 1.0, "started": 1.5, "first_token": 1.75, "finished": 2.75}
    metrics = RequestMetrics(10, 1, "auto", num_output_tokens=5, num_cached_tokens=4, speculative_decoding=stats)
    for name, value in (told | own).items():
        setattr(metrics, name, value)
    return Result("", [1] * 5, reason, metrics)


@pytest.mark.parametrize("prefix", ["specbuild:", "vllm:"])
def test_what_a_sample_counts(prefix: str) -> None:
    metrics = Metrics({}, prefix)
    metrics.finished("m", result())
    metrics.finished("m", result("cancelled"))
    found = samples(metrics)
    for name, value in {
        "request_success_total stop": 1,
        "request_success_total abort": 1,
        "prompt_tokens_total": 20,
        "generation_tokens_total": 10,
        "prefix_cache_queries_total": 20,
        "prefix_cache_hits_total": 8,
        "spec_decode_num_drafts_total": 6,
        "spec_decode_num_draft_tokens_total": 24,
        "spec_decode_num_accepted_tokens_total": 10,
        "spec_decode_num_accepted_tokens_per_pos_total 0": 4,
        "spec_decode_num_accepted_tokens_per_pos_total 2": 2,
        "time_to_first_token_seconds_sum": 1.5,
        "request_queue_time_seconds_sum": 1.0,
        "request_prefill_time_seconds_sum": 0.5,
        "request_decode_time_seconds_sum": 2.0,
        "request_time_per_output_token_seconds_sum": 0.5,
        "e2e_request_latency_seconds_sum": 3.5,
    }.items():
        name, _, label = name.partition(" ")
        assert found[prefix + name, label] == pytest.approx(value), name
    assert found["specbuild:decisions_total", "model"] == 2
    assert found["specbuild:promised_speedup_sum_total", ""] == 3.5
    assert (found["specbuild:unsettled_steps_total", ""], found["specbuild:recomputed_tokens_total", ""]) == (2, 4)


def test_what_never_ran_has_no_times() -> None:
    metrics = Metrics({})
    metrics.finished("m", Result("", [], "error", None))
    metrics.finished("m", result("cancelled", started=None, first_token=None, num_output_tokens=0))
    found = samples(metrics)
    assert found["specbuild:request_success_total", "error"] == 1
    assert ("specbuild:time_to_first_token_seconds_sum", "") not in found
    assert ("specbuild:prompt_tokens_total", "") not in found


def test_gaps_are_of_tokens_and_rejections_of_reasons() -> None:
    metrics = Metrics({})
    metrics.chunk("m", 0.3, 3)
    metrics.rejected("m", "queue_full")
    found = samples(metrics)
    assert found["specbuild:inter_token_latency_seconds_count", ""] == 3
    assert found["specbuild:inter_token_latency_seconds_sum", ""] == pytest.approx(0.3)
    assert found["specbuild:admission_rejections_total", "queue_full"] == 1


def test_gauges_are_read_when_somebody_looks(engine: Engine) -> None:
    metrics = Metrics({"m": engine})
    assert samples(metrics)["specbuild:num_requests_running", ""] == 0
    handle = engine.submit("def main(")
    assert samples(metrics)["specbuild:num_requests_running", ""] == 1
    handle.result()
    assert 0 <= samples(metrics)["specbuild:kv_cache_usage_perc", ""] <= 1


def test_openmetrics_where_it_is_accepted() -> None:
    text, kind = Metrics({}).render("application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert text.endswith(b"# EOF\n")
