"""Metrics: vLLM's names, and what requests put into them."""

import math
from dataclasses import replace

import pytest
from data_files import table
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from specbuild.runtime import RequestMetrics, Result, SpeculationStats
from specbuild.serve.cost.options import CostOptions
from specbuild.serve.metrics import Metrics

OWN = "specbuild:"


def samples(metrics):
    """By name and the labels beside the model's; of histograms the bounds of buckets too."""
    found = {}
    for family in text_string_to_metric_families(metrics.render()[0].decode()):
        for each in family.samples:
            labels = [value for name, value in each.labels.items() if name != "model_name"]
            found[" ".join([each.name, *labels])] = each.value
    return found


def result(reason="stop", **own):
    stats = SpeculationStats()
    for accepted in (0, 2, 3):
        stats.record(4, accepted)
    stats.decide("model", 1.75)
    told = {"num_output_tokens": 5, "num_cached_tokens": 4, "speculative_decoding": stats}
    told |= {"submitted": 1.0, "started": 1.5, "first_token": 1.75, "finished": 2.75}
    metrics = RequestMetrics(10, 1, "auto")
    for name, value in (told | own).items():
        setattr(metrics, name, value)
    return Result("", [1] * 5, reason, metrics)


def finished(*results, **options):
    metrics = Metrics({}, **options)
    for each in results:
        metrics.finished("m", each)
    return metrics


@pytest.mark.parametrize("prefix", [OWN, "vllm:"])
def test_what_a_sample_counts(prefix):
    found = samples(finished(result(), result("cancelled"), prefix=prefix))
    theirs, ours = table("metrics.json").values()
    wanted = {prefix + name: value for name, value in theirs.items()}
    wanted |= {OWN + name: value for name, value in ours.items()}
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)


def test_what_never_ran_has_no_times():
    never = result("cancelled", started=None, first_token=None, num_output_tokens=0)
    found = samples(finished(Result("", [], "error", None), never))
    assert found[f"{OWN}request_success_total error"] == 1
    for name in ("time_to_first_token_seconds_count", "request_prefill_time_seconds_count", "prompt_tokens_total"):
        assert found[OWN + name] == 0


def test_one_token_has_no_time_between_tokens():
    found = samples(finished(result(num_output_tokens=1)))
    for name, count in (("time_to_first_token", 1), ("request_time_per_output_token", 0), ("request_decode_time", 0)):
        assert found[f"{OWN}{name}_seconds_count"] == count


BUCKETS = """
time_to_first_token 0.001 0.06 7.5 160 640 2560
inter_token_latency 0.01 0.075 7.5 20 40 80
request_time_per_output_token 0.01 0.075 7.5 20 40 80
e2e_request_latency 0.3 0.8 960 1920 7680
request_queue_time 0.3 0.8 960 1920 7680
"""


@pytest.mark.parametrize("line", BUCKETS.strip().splitlines())
def test_buckets_are_vllms_and_finer_ones(line):
    name, *theirs = line.split()
    metrics = finished(result())
    metrics.chunk("m", 1.0, 1)
    bounds = [float(each.split()[1]) for each in samples(metrics) if each.startswith(f"{OWN}{name}_seconds_bucket")]
    assert {*map(float, theirs), math.inf} <= {*bounds}
    assert bounds == sorted(bounds)


def test_gaps_are_of_tokens_and_rejections_of_reasons():
    metrics = Metrics({})
    metrics.chunk("m", 0.31, 3)
    metrics.chunk("m", 0.1, 0)
    metrics.rejected("m", "queue_full")
    found = samples(metrics)
    assert found[f"{OWN}inter_token_latency_seconds_count"] == 3
    assert found[f"{OWN}inter_token_latency_seconds_sum"] == pytest.approx(0.31)
    gaps = [(each, n) for each, n in found.items() if each.startswith(f"{OWN}inter_token_latency_seconds_bucket")]
    assert all(n == (3 if float(each.split()[1]) > 0.1 else 0) for each, n in gaps)
    assert found[f"{OWN}admission_rejections_total queue_full"] == 1


def test_engines_that_cannot_say_how_they_are_do_no_harm(engine, hash_engine):
    class Broken:
        @property
        def usage(self):
            raise RuntimeError("a bug")

    class Crowded:
        correction, usage = 1.5, replace(engine.usage, cache_tokens=20, cache_capacity_tokens=10)

    closed = hash_engine()
    closed.close()
    engines = {"broken": Broken(), "crowded": Crowded(), "closed": closed, "m": engine}
    text = Metrics(engines).render()[0].decode()
    assert 'specbuild:num_requests_running{model_name="broken"}' not in text
    for told in ("num_requests_running m 0.0", "kv_cache_usage_perc crowded 1.0", "prompt_tokens_total closed 0.0"):
        name, model, value = told.split()
        assert f'{OWN}{name}{{model_name="{model}"}} {value}' in text


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.3,*/*;q=0.1",
        "Application/OpenMetrics-Text; version=abc",
    ],
)
def test_openmetrics_where_it_is_accepted(accept):
    text, kind = finished(result(), prefix="vllm:").render(accept)
    assert kind == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert b'vllm:request_success_total{finished_reason="stop",model_name="m"} 1.0' in text
    names = {family.name for family in openmetrics.text_string_to_metric_families(text.decode())}
    assert names >= {"vllm:prompt_tokens", "vllm:inter_token_latency_seconds", "specbuild:decisions"}


@pytest.mark.parametrize("accept", ["", "*/*", "text/plain;version=1.0.0;escaping=zzz", ",;="])
def test_whatever_else_is_accepted_gets_the_text(accept):
    assert Metrics({}).render(accept)[1] == "text/plain; version=0.0.4; charset=utf-8"


def test_what_samples_cost_and_would_have_cost():
    ended = result(busy_time=3.0, plain_time=5.0), result("cancelled", busy_time=1.0, plain_time=math.nan)
    found = samples(finished(*ended, cost=CostOptions(price_per_hour=36.0, currency="EUR")))
    told = [found[OWN + name] for name in ("cost_total EUR", "busy_seconds_total", "baseline_seconds_total")]
    assert told == pytest.approx([0.04, 4.0, 5.0])
    assert not [name for name in samples(finished(*ended)) if "cost" in name]
