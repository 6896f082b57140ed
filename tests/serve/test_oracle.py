"""The shadow oracle: it is silent where texts are honest, and finds the first one that is not."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from serving import Log, Server

from specbuild.runtime import Receipt, Result, SamplingParams
from specbuild.runtime.errors import EngineClosedError, ExecutionError
from specbuild.runtime.requests.metrics import RequestMetrics
from specbuild.runtime.sampling.sampler import Sampler
from specbuild.serve.admission import Admission
from specbuild.serve.models import Models, ServedModel
from specbuild.serve.options import ServeOptions
from specbuild.serve.oracle import TRIES, WAITING, Oracle, Shadow

ASKED: dict[str, Any] = {"prompt": "def main(", "max_tokens": 24, "temperature": 0.8, "seed": 3}


def settle(oracle: Oracle) -> None:
    """Let it decode what waits."""

    async def run() -> None:
        task = asyncio.create_task(oracle.run())
        while any(oracle._waiting.values()) and not task.done():
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def shadows(client: TestClient) -> dict[str, int]:
    """How many had each outcome, by the metrics; those that none had left out."""
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith("specbuild:shadows_total{")]
    counts = {line.split('outcome="')[1].split('"')[0]: int(float(line.split()[-1])) for line in lines}
    assert counts.keys() == {"equal", "different", "unfinished", "dropped", "failed"}
    return {outcome: count for outcome, count in counts.items() if count}


def tokens(client: TestClient) -> float:
    """Of texts, by the metrics."""
    (line,) = [each for each in client.get("/metrics").text.splitlines() if "generation_tokens_total{" in each]
    return float(line.split()[-1])


@pytest.fixture
def lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speculation, which now and then lets another token through."""
    choose = Sampler.choose

    def chosen(self: Sampler, row: Any, position: int, path: Sequence[int]) -> int:
        token = choose(self, row, position, path)
        return token if self.params.speculation == "off" or position % 13 else token ^ 1

    monkeypatch.setattr(Sampler, "choose", chosen)


def test_honest_texts_are_equal_and_counted_apart(make_client: Callable[..., TestClient], log: Log) -> None:
    client = make_client(shadow=1.0)
    for asked in (ASKED, ASKED | {"n": 2, "temperature": 0}, ASKED | {"stream": True}, ASKED | {"speculation": "off"}):
        assert client.post("/v1/completions", json=asked).status_code == 200
    before = tokens(client)
    settle(client.service.oracle)  # type: ignore[attr-defined]
    assert shadows(client) == {"equal": 4}, "what nobody speculated on is not decoded again"
    assert tokens(client) == before
    assert not [line for line in log.lines if line.get("level")]


@pytest.mark.usefixtures("lie")
@pytest.mark.parametrize("keeps", [False, True])
def test_one_that_differs_is_kept_and_ends_speculation(
    make_client: Callable[..., TestClient], log: Log, tmp_path: Path, keeps: bool
) -> None:
    client = make_client(shadow=1.0, shadow_dir=tmp_path, shadow_keep_prompts=keeps, shadow_action="off")
    client.post("/v1/completions", json=ASKED)
    settle(client.service.oracle)  # type: ignore[attr-defined]
    assert shadows(client) == {"different": 1}
    (line,) = [line for line in log.lines if line.get("level") == "error"]
    (file,) = tmp_path.iterdir()
    assert (line["model"], line["speculation"], line["file"]) == ("pycode", "off", str(file))
    kept = json.loads(file.read_text())
    at = kept["position"]
    assert kept["token_ids"][:at] == kept["plain_token_ids"][:at]
    assert kept["token_ids"][at] == kept["plain_token_ids"][at] ^ 1
    assert Receipt.from_dict(kept["receipt"]).seed == 3
    assert ("prompt_token_ids" in kept) is keeps
    after = client.post("/v1/completions", json=ASKED).json()
    assert after["metrics"]["speculative_decoding"]["num_spec_steps"] == 0
    assert client.get("/health/ready").status_code == 200


class Scripted:
    """An engine whose twins are told beforehand."""

    def __init__(self, *results: Result | Exception) -> None:
        self.results, self.asked = list(results), list[SamplingParams]()

    async def generate(self, prompts: Any, params: SamplingParams) -> list[Result]:
        self.asked.append(params)
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return [result]


def text(token_ids: Sequence[int], reason: str = "length", speculation: str = "auto", **other: Any) -> Result:
    return Result("", [*token_ids], reason, RequestMetrics(1, 9, speculation), **other)


def oracle_of(engine: Scripted, log: Log, share: float = 1.0) -> tuple[Oracle, list[str]]:
    outcomes = list[str]()
    model = ServedModel(("m",), Path("m"), engine, {}, Admission(1, 4))  # type: ignore[arg-type]
    counts: Any = SimpleNamespace(shadowed=lambda model, outcome: outcomes.append(outcome))
    return Oracle(Models([model]), ServeOptions(shadow=share), counts, log), outcomes  # type: ignore[arg-type]


def offer(oracle: Oracle, *results: Result, samples: int = 1) -> None:
    params = SamplingParams(4, temperature=1.0, n=samples, deadline=5.0, session="s", logprobs=2, priority=-3)
    generation: Any = SimpleNamespace(
        served=oracle._models["m"], results=dict(enumerate(results)), samples=samples, params=params, prompts=[[1], [2]]
    )
    oracle.ended(generation)


@pytest.mark.parametrize(
    ("twins", "outcome"),
    [
        ([text([1, 2, 3])], "equal"),
        ([text([1, 2], "cancelled"), text([], "cancelled"), text([1, 2, 3])], "equal"),
        ([text([1, 2, 3], "cancelled"), text([1, 2, 3])], "equal"),
        ([text([1, 9], "cancelled")], "different"),
        ([text([1, 2])], "different"),
        ([text([1, 2, 3, 4])], "different"),
        ([text([1, 2], "cancelled")] * TRIES, "unfinished"),
        ([text([], "error", error=ExecutionError("no memory"))], "failed"),
        ([ValueError("a bug")], "failed"),
    ],
)
def test_what_comes_of_a_shadow(log: Log, twins: list[Any], outcome: str) -> None:
    engine = Scripted(*twins, text([1, 2, 3]))
    oracle, outcomes = oracle_of(engine, log)
    offer(oracle, text([1, 2, 3]), text([1, 2, 3]))
    settle(oracle)
    assert outcomes == [outcome, "equal"], "the next one is decoded all the same"
    told = {"failed": "warning", "different": "error"}.get(outcome)
    assert [line["level"] for line in log.lines] == ([told] if told else [])


def test_its_twin_reads_its_prompt_itself_and_waits_for_everybody(log: Log) -> None:
    engine = Scripted(text([1]), text([1]))
    oracle, _ = oracle_of(engine, log)
    offer(oracle, text([1]), text([1]), samples=2)
    settle(oracle)
    first, second = engine.asked
    assert (first.speculation, first.background, first.seed, first.n) == ("off", True, 9, 1)
    assert (first.deadline, first.session, first.logprobs, first.temperature) == (None, None, None, 1.0)
    assert first.cache_salt != second.cache_salt


def test_nothing_is_decoded_while_requests_are_under_way_or_the_engine_is_closed(log: Log) -> None:
    engine = Scripted(EngineClosedError("closed"))
    oracle, outcomes = oracle_of(engine, log)
    offer(oracle, text([1]))
    model = oracle._models["m"]

    async def run() -> None:
        with model.admission.room(1):
            task = asyncio.create_task(oracle.run())
            await asyncio.sleep(0.1)
            assert engine.asked == []
        await asyncio.wait_for(task, 10)

    asyncio.run(run())
    assert (len(engine.asked), outcomes, log.lines) == (1, [], [])


def test_what_is_offered_is_a_share_of_whole_texts_and_bounded(log: Log) -> None:
    oracle, outcomes = oracle_of(Scripted(), log, share=0.25)
    oracle._draw = random.Random(0)
    offer(oracle, *(text([1], reason) for reason in ("cancelled", "deadline", "error")), text([1], "stop", "off"))
    assert not oracle._waiting["m"]
    for _ in range(200):
        offer(oracle, text([1]))
    assert 30 < len(oracle._waiting["m"]) < 64
    oracle._options = replace(oracle._options, shadow=1.0)
    for _ in range(WAITING):
        offer(oracle, text([1]))
    assert len(oracle._waiting["m"]) == WAITING
    assert set(outcomes) == {"dropped"}


def test_a_shadow_knows_where_its_twin_differs() -> None:
    shadow = Shadow([1], SamplingParams(), text([5, 6]))
    assert [shadow.differs_at(text(each)) for each in ([5, 6], [5, 7], [5], [5, 6, 7])] == [None, 1, 1, 2]


@pytest.mark.slow
def test_a_server_settles_its_texts(bundle: Path) -> None:
    with Server(str(bundle), "--port", "0", "--shadow", "1") as server, server.client() as client:
        for seed in range(12):
            assert client.post("/v1/completions", json=ASKED | {"seed": seed}).status_code == 200
        for _ in range(600):
            if 'shadows_total{model_name="pycode",outcome="equal"} 12.0' in (told := client.get("/metrics").text):
                break
            time.sleep(0.05)
        else:
            pytest.fail(told)
