"""The shadow oracle: it is silent where texts are honest, and finds the first one that is not."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import ended
import pytest

from specbuild.runtime import Result, SamplingParams
from specbuild.runtime.engine.receipt import keyed_sha256
from specbuild.runtime.errors import EngineClosedError, ExecutionError
from specbuild.runtime.requests.metrics import RequestMetrics
from specbuild.runtime.sampling.sampler import Sampler
from specbuild.serve.options import ServeOptions
from specbuild.serve.request.admission import Admission
from specbuild.serve.request.models import Models, ServedModel
from specbuild.serve.shadow.shadow_check import Oracle

SAMPLED = {"prompt": "def main(", "max_tokens": 24, "temperature": 0.8, "seed": 3}


def shadows(client):
    """How many had each outcome, by the metrics; those that none had left out."""
    series = {name: value for name, value in client.series().items() if name.startswith("specbuild:shadows_total")}
    assert len(series) == 5
    return {name.split('outcome="')[1].split('"')[0]: value for name, value in series.items() if value}


@pytest.fixture
def lie(monkeypatch):
    """Speculation, which now and then lets another token through."""
    choose = Sampler.choose

    def chosen(self, row, position, path):
        token = choose(self, row, position, path)
        return token if self.params.speculation == "off" or position % 13 else token ^ 1

    monkeypatch.setattr(Sampler, "choose", chosen)


@pytest.mark.slow
@pytest.mark.usefixtures("lie")
@pytest.mark.parametrize("keeps", [False, True])
def test_one_that_differs_is_kept_and_ends_speculation(make_client, engine, log, tmp_path, keeps):
    client = make_client(shadow=1.0, shadow_dir=tmp_path, shadow_keep_prompts=keeps, shadow_action="off")
    client.ask(**SAMPLED)
    ended.settle(client.service.oracle)
    assert shadows(client) == {"different": 1}
    (line,), (file,) = [line for line in log.lines if line.get("level") == "error"], tmp_path.glob("*.json")
    assert (line["model"], line["speculation"], line["file"]) == ("pycode", "off", str(file))
    kept = json.loads(file.read_text())
    at, ours, plain = kept["position"], kept["token_ids"], kept["plain_token_ids"]
    assert (ours[:at], ours[at], kept["receipt"]["seed"]) == (plain[:at], plain[at] ^ 1, 3)
    assert ("prompt_sha256" in kept["receipt"]) is ("prompt_token_ids" in kept) is keeps
    keys = [*tmp_path.glob("*.key")]
    assert [key.name for key in keys] == ([] if keeps else [kept["key"]])
    for key in keys:
        keyed = keyed_sha256(bytes.fromhex(key.read_text()), engine.encode(SAMPLED["prompt"]))
        assert (key.stat().st_mode & 0o777, kept["prompt_hmac_sha256"]) == (0o600, keyed)
    assert client.ask(**SAMPLED)["metrics"]["speculative_decoding"]["num_spec_steps"] == 0
    assert client.get("/health/ready").status_code == 200


@pytest.mark.slow
@pytest.mark.usefixtures("lie")
def test_one_that_differs_is_reported_where_no_file_can_be_kept(make_client, log, tmp_path):
    folder = tmp_path / "shadows"
    folder.mkdir()
    client = make_client(shadow=1.0, shadow_dir=folder)
    folder.rmdir()
    client.ask(**SAMPLED)
    ended.settle(client.service.oracle)
    assert shadows(client) == {"different": 1}
    lost, different = [line for line in log.lines if line.get("level") == "error"]
    assert "could not be kept" in str(lost)
    assert (different["model"], different["file"]) == ("pycode", None)


class Scripted:
    """An engine whose twins are told beforehand; the last of them again and again."""

    def __init__(self, *results):
        self.results, self.asked = list(results), list[SamplingParams]()

    async def generate(self, prompts, params):
        self.asked.append(params)
        result = self.results.pop(0) if len(self.results) > 1 else self.results[0]
        if isinstance(result, Exception):
            raise result
        return [result]


def text(token_ids, reason="length", speculation="auto", **other):
    return Result("", [*token_ids], reason, RequestMetrics(1, 9, speculation), **other)


def oracle_of(engine, log, share=1.0):
    outcomes, model = list[str](), ServedModel(("m",), Path("m"), engine, {}, Admission(1, 4))
    counts = SimpleNamespace(shadowed=lambda model, outcome: outcomes.append(outcome))
    return Oracle(Models([model]), ServeOptions(shadow=share), counts, log), outcomes, model


def offer(oracle, model, *results, **more):
    params = SamplingParams(4, temperature=1.0, n=2, deadline=5.0, session="s", logprobs=2, priority=-3)
    oracle.ended(ended.generation(model, *results, samples=2, **{"params": params, "prompts": [[1], [2]]} | more))


@pytest.mark.parametrize(
    ("twins", "outcome"),
    [
        ([text([1, 2, 3])], "equal"),
        ([text([1, 2], "cancelled"), text([], "cancelled"), text([1, 2, 3])], "equal"),
        ([text([1, 2, 3], "cancelled"), text([1, 2, 3])], "equal"),
        ([text([1, 9], "cancelled")], "different"),
        ([text([1, 2])], "different"),
        ([text([1, 2, 3, 4])], "different"),
        ([text([1, 2], "cancelled")] * 16, "unfinished"),
        ([text([], "error", error=ExecutionError("no memory"))], "failed"),
        ([ValueError("a bug")], "failed"),
    ],
)
def test_what_comes_of_a_shadow(log, twins, outcome):
    oracle, outcomes, model = oracle_of(Scripted(*twins, text([1, 2, 3])), log)
    offer(oracle, model, text([1, 2, 3]), text([1, 2, 3]))
    ended.settle(oracle)
    assert outcomes == [outcome, "equal"], "the next one is decoded all the same"
    told = {"failed": ["warning"], "different": ["error"]}.get(outcome, [])
    assert [line["level"] for line in log.lines] == told


def test_nothing_is_decoded_while_requests_are_under_way_or_the_engine_is_closed(log):
    engine = Scripted(EngineClosedError("closed"))
    oracle, outcomes, model = oracle_of(engine, log)
    offer(oracle, model, text([1]))

    async def run():
        with model.admission.room(1):
            task = asyncio.create_task(oracle.run())
            await asyncio.sleep(0.1)
            assert engine.asked == []
        await asyncio.wait_for(task, 10)

    asyncio.run(run())
    assert (len(engine.asked), outcomes, log.lines) == (1, [], [])


@pytest.mark.parametrize(("share", "offers", "least", "most"), [(0.25, 200, 20, 80), (1.0, 1000, 1, 999)])
def test_what_is_offered_is_a_share_of_whole_texts_and_bounded(log, share, offers, least, most):
    engine = Scripted(text([1]))
    oracle, outcomes, model = oracle_of(engine, log, share)
    offer(oracle, model, *(text([1], each) for each in ("cancelled", "deadline", "error")), text([1], "stop", "off"))
    for _ in range(offers):
        offer(oracle, model, text([1]))
    dropped = len(outcomes)
    assert outcomes == ["dropped"] * dropped
    ended.settle(oracle)
    assert least <= len(engine.asked) <= most
    assert share < 1 or len(engine.asked) + dropped == offers
