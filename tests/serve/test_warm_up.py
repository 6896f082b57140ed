"""The warm-up: a request of each kind has run before the first one comes, and nothing that is told counts any."""

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import Server

from specbuild.runtime import Engine, Result
from specbuild.runtime.errors import ExecutionError
from specbuild.serve.http.warm_up import warm_up

ASKED = {"prompt": "def main(", "max_tokens": 4}


def kinds(bundle, **options):
    """The rate, and what each request was, from its metrics."""
    results = list[Result]()
    with Engine.load(bundle, on_finish=results.append, **options) as engine:
        rate = warm_up(engine)
    return rate, [result.metrics for result in results]


def test_a_request_of_each_kind_runs(bundle):
    rate, ran = kinds(bundle, batch_size=2)
    assert rate
    assert rate > 0
    assert all(each.background for each in ran)
    lengths = {each.num_prompt_tokens for each in ran}
    assert max(lengths) >= 8 * min(lengths)
    assert {each.speculative_decoding.num_spec_steps > 0 for each in ran} == {True, False}
    assert {each.speculation == "off" for each in ran} == {True, False}
    assert max(each.num_output_tokens for each in ran) > 8, "enough to measure"


def test_a_model_that_fails_is_not_served(bundle, monkeypatch):
    def broken(*_):
        raise ExecutionError("planted")

    with Engine.load(bundle) as engine:
        with engine.scheduler.exclusive() as loop:
            monkeypatch.setattr(loop, "round", broken)
        with pytest.raises(ExecutionError, match="planted"):
            warm_up(engine)


@pytest.mark.slow
def test_nothing_counts_it(bundle, tmp_path):
    """Neither metrics nor ledger nor sample nor cached prompts; the log says what was planned and measured."""
    ledger, sample = tmp_path / "ledger.jsonl", tmp_path / "live.jsonl"
    flags = ("--port", "0", "--ledger", str(ledger), "--text-sample", str(sample), "--max-num-seqs", "1")
    with Server(str(bundle), *flags) as server, server.client() as client:
        said = server.lines[0]["message"]
        assert "MB planned" in said
        assert "plain decoding measured at" in said
        assert "request" not in {line["message"] for line in server.lines}
        (before,) = [json.loads(line) for line in ledger.read_text(encoding="utf-8").splitlines()]
        assert set(before["busy_seconds"].values()) == {0.0}
        told = text_string_to_metric_families(client.get("/metrics").text)
        counted = [each for family in told for each in family.samples if family.type in ("counter", "histogram")]
        assert counted
        assert [each.name for each in counted if each.value and not each.name.endswith("_created")] == []
        reply = client.post("/v1/completions", json=ASKED).json()
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
