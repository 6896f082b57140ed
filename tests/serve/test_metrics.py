"""Metrics: vLLM's names, and what requests put into them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from specbuild.runtime import Engine, RequestMetrics, Result, SamplingParams, SpeculationStats, Usage
from specbuild.serve.cost_options import CostOptions
from specbuild.serve.metrics import MAX_POSITIONS, TOKEN, Metrics


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
    assert found["specbuild:time_to_first_token_seconds_count", ""] == 0
    assert found["specbuild:request_prefill_time_seconds_count", ""] == 0
    assert found["specbuild:prompt_tokens_total", ""] == 0


def test_series_of_what_is_served_begin_at_zero(engine: Engine) -> None:
    found = samples(Metrics({"m": engine}))
    gauges = "specbuild:num_requests", "specbuild:timing_correction"
    counted = {name: value for (name, label), value in found.items() if not name.startswith(gauges)}
    assert found["specbuild:timing_correction", ""] == engine.correction > 0
    assert set(counted.values()) == {0}
    assert {label for name, label in found if name == "specbuild:request_success_total"} >= {"stop", "length", "abort"}
    for name in ("inter_token_latency_seconds_count", "spec_decode_num_drafts_total", "prompt_tokens_total"):
        assert f"specbuild:{name}" in counted


def test_late_places_count_for_the_last() -> None:
    metrics, stats = Metrics({}), SpeculationStats()
    for accepted in (1, 33, 40):
        stats.record(50, accepted)
    metrics.finished("m", result(speculative_decoding=stats))
    places = {int(label): n for (name, label), n in samples(metrics).items() if name.endswith("per_pos_total")}
    assert (places[0], places[1], places[30]) == (3, 2, 2)
    assert max(places) == MAX_POSITIONS - 1
    assert places[31] == (33 - 31) + (40 - 31)
    assert sum(places.values()) == 1 + 33 + 40


def buckets(metrics: Metrics, name: str) -> dict[float, float]:
    """By their upper bounds."""
    families = text_string_to_metric_families(metrics.render()[0].decode())
    (family,) = [each for each in families if each.name == f"specbuild:{name}"]
    return {float(each.labels["le"]): each.value for each in family.samples if each.name.endswith("_bucket")}


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("time_to_first_token_seconds", (0.001, 0.06, 7.5, 160, 640, 2560)),
        ("inter_token_latency_seconds", (0.01, 0.075, 7.5, 20, 40, 80)),
        ("request_time_per_output_token_seconds", (0.01, 0.075, 7.5, 20, 40, 80)),
        ("e2e_request_latency_seconds", (0.3, 0.8, 960, 1920, 7680)),
        ("request_queue_time_seconds", (0.3, 0.8, 960, 1920, 7680)),
    ],
)
def test_buckets_are_vllms_and_finer_ones(name: str, theirs: tuple[float, ...]) -> None:
    metrics = Metrics({})
    metrics.finished("m", result())
    metrics.chunk("m", 1.0, 1)
    found = buckets(metrics, name)
    assert {*theirs, math.inf} <= found.keys()
    assert list(found) == sorted(found)


def test_gaps_are_of_tokens_and_rejections_of_reasons() -> None:
    metrics = Metrics({})
    metrics.chunk("m", 0.31, 3)
    metrics.chunk("m", 0.1, 0)
    metrics.rejected("m", "queue_full")
    found = samples(metrics)
    assert found["specbuild:inter_token_latency_seconds_count", ""] == 3
    assert found["specbuild:inter_token_latency_seconds_sum", ""] == pytest.approx(0.31)
    assert buckets(metrics, "inter_token_latency_seconds") == {
        bound: 3 if bound > 0.1 else 0 for bound in (*TOKEN, math.inf)
    }
    assert found["specbuild:admission_rejections_total", "queue_full"] == 1


def test_gauges_are_read_when_somebody_looks(engine: Engine) -> None:
    metrics = Metrics({"m": engine})
    assert samples(metrics)["specbuild:num_requests_running", ""] == 0
    handle = engine.submit("def main(")
    assert samples(metrics)["specbuild:num_requests_running", ""] == 1
    handle.result()
    assert 0 <= samples(metrics)["specbuild:kv_cache_usage_perc", ""] <= 1


def test_engines_that_cannot_say_how_they_are_do_no_harm(engine: Engine) -> None:
    class Broken:
        @property
        def usage(self) -> Usage:
            raise RuntimeError("a bug")

    class Crowded:
        correction = 1.5
        usage = replace(engine.usage, cache_tokens=20, cache_capacity_tokens=10)

    engines: dict[str, Any] = {"broken": Broken(), "crowded": Crowded(), "m": engine}
    text = Metrics(engines).render()[0].decode()
    assert 'specbuild:num_requests_running{model_name="m"} 0.0' in text
    assert 'specbuild:num_requests_running{model_name="broken"}' not in text
    assert 'specbuild:kv_cache_usage_perc{model_name="crowded"} 1.0' in text
    assert 'specbuild:timing_correction{model_name="crowded"} 1.5' in text


def test_closed_and_failed_engines_are_scraped(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed, failed = Engine.load(bundle, batch_size=1), Engine.load(bundle, batch_size=1)
    closed.close()

    def release(slot: int) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(failed.scheduler._loop, "release", release)
    failed.submit("def main(", SamplingParams(max_new_tokens=2)).result(60)
    worker = failed.scheduler._worker
    assert worker
    worker.join(60)
    metrics = Metrics({"closed": closed, "failed": failed})
    assert failed.health().state == "failed"
    assert b'specbuild:prompt_tokens_total{model_name="failed"} 0.0' in metrics.render()[0]


def test_what_an_engine_tells_is_what_its_results_say(bundle: Path) -> None:
    """The engine's own results, by `on_finish`, as a server has them."""
    results = list[Result]()
    with Engine.load(bundle, batch_size=2, on_finish=results.append) as engine:
        metrics = Metrics({"m": engine})
        params = SamplingParams(max_new_tokens=12, n=2, seed=1, ignore_eos=True, speculation="chain:3")
        engine.generate(["def main(", "import os\n"], params)
    for each in results:  # closing has waited for whoever is told of them
        metrics.finished("m", each)
    found, own = samples(metrics), [each.metrics for each in results if each.metrics]
    stats = [each.speculative_decoding for each in own]
    assert found["specbuild:request_success_total", "length"] == 4
    assert found["specbuild:generation_tokens_total", ""] == 48
    assert found["specbuild:prompt_tokens_total", ""] == sum(each.num_prompt_tokens for each in own)
    assert found["specbuild:spec_decode_num_drafts_total", ""] == sum(each.num_spec_steps for each in stats) > 0
    accepted = sum(each.num_accepted_draft_tokens for each in stats)
    assert found["specbuild:spec_decode_num_accepted_tokens_total", ""] == accepted
    places = [
        value for (name, _), value in found.items() if name == "specbuild:spec_decode_num_accepted_tokens_per_pos_total"
    ]
    assert sum(places) == accepted > 0
    assert found["specbuild:e2e_request_latency_seconds_sum", ""] == pytest.approx(sum(each.e2el for each in own))
    assert found["specbuild:time_to_first_token_seconds_count", ""] == 4


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,*/*;q=0.1",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.3,*/*;q=0.1",
        "Application/OpenMetrics-Text; version=abc",
        "application/openmetrics-text; version=9",
    ],
)
def test_openmetrics_where_it_is_accepted(accept: str) -> None:
    metrics = Metrics({}, "vllm:")
    metrics.finished("m", result())
    metrics.chunk("m", 0.1, 2)
    text, kind = metrics.render(accept)
    assert kind == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert b'vllm:request_success_total{finished_reason="stop",model_name="m"} 1.0' in text
    names = {family.name for family in openmetrics.text_string_to_metric_families(text.decode())}
    assert names >= {"vllm:prompt_tokens", "vllm:inter_token_latency_seconds", "specbuild:decisions"}


@pytest.mark.parametrize(
    "accept", ["", "*/*", "text/plain; version=1.x", "text/plain;version=1.0.0;escaping=zzz", ",;="]
)
def test_whatever_else_is_accepted_gets_the_text(accept: str) -> None:
    assert Metrics({}).render(accept)[1] == "text/plain; version=0.0.4; charset=utf-8"


def test_what_samples_cost_and_would_have_cost() -> None:
    metrics = Metrics({}, cost=CostOptions(price_per_hour=36.0, currency="EUR"))
    metrics.finished("m", result(busy_time=3.0, plain_time=5.0))
    metrics.finished("m", result("cancelled", busy_time=1.0, plain_time=math.nan))
    found = samples(metrics)
    assert found["specbuild:cost_total", "EUR"] == pytest.approx(0.04)
    assert found["specbuild:busy_seconds_total", ""] == 4.0
    assert found["specbuild:baseline_seconds_total", ""] == 5.0
    assert not [name for name, _ in samples(Metrics({})) if "cost" in name]
