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

from specbuild.runtime import AsyncEngine, Engine, Result, SamplingParams
from specbuild.runtime.engine.receipt import keyed_sha256
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
        await oracle.settled()
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
    make_client: Callable[..., TestClient], engine: Engine, log: Log, tmp_path: Path, keeps: bool
) -> None:
    client = make_client(shadow=1.0, shadow_dir=tmp_path, shadow_keep_prompts=keeps, shadow_action="off")
    client.post("/v1/completions", json=ASKED)
    settle(client.service.oracle)  # type: ignore[attr-defined]
    assert shadows(client) == {"different": 1}
    (line,) = [line for line in log.lines if line.get("level") == "error"]
    (file,), key = tmp_path.glob("*.json"), next(tmp_path.glob("*.key"), None)
    assert (key is None) is keeps
    assert (line["model"], line["speculation"], line["file"]) == ("pycode", "off", str(file))
    kept = json.loads(file.read_text())
    at = kept["position"]
    assert kept["token_ids"][:at] == kept["plain_token_ids"][:at]
    assert kept["token_ids"][at] == kept["plain_token_ids"][at] ^ 1
    assert kept["receipt"]["seed"] == 3
    assert ("prompt_sha256" in kept["receipt"]) is keeps
    assert ("prompt_token_ids" in kept) is keeps
    if key:
        assert (key.stat().st_mode & 0o777, key.name) == (0o600, kept["key"])
        prompt = engine.encode(ASKED["prompt"])
        keyed = keyed_sha256(bytes.fromhex(key.read_text()), prompt)
        assert kept["prompt_hmac_sha256"] == keyed
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


class Endless(Scripted):
    """An engine whose twins are all the same."""

    async def generate(self, prompts: Any, params: SamplingParams) -> list[Result]:
        return [self.results[0]]  # type: ignore[list-item]


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


def test_an_oracle_that_has_nothing_to_do_sets_no_timer(log: Log) -> None:
    engine = Scripted(text([1]), text([1]))
    oracle, outcomes = oracle_of(engine, log)
    admission = oracle._models["m"].admission

    async def run() -> None:
        loop, timers = asyncio.get_running_loop(), list[Any]()
        loop.call_at = loop.call_later = lambda *given, **_: timers.append(given)  # type: ignore[assignment, method-assign]
        task = asyncio.create_task(oracle.run())
        with admission.room(1), admission.room(1):
            offer(oracle, text([1]), text([1]))
            for _ in range(9):
                await asyncio.sleep(0)
            assert engine.asked == []
        with admission.room(1):  # another came before the oracle was told that nobody is there
            for _ in range(9):
                await asyncio.sleep(0)
            assert engine.asked == []
        await oracle.settled()
        task.cancel()
        assert (outcomes, timers) == (["equal"] * 2, [])

    asyncio.run(run())


def test_a_foreground_request_waits_for_one_shadow_round_at_most(hash_engine: Any, log: Log) -> None:
    """However long the shadow is: the round that is under way ends, and the next one is the request's."""
    own, rounds = hash_engine(gated=True), list[list[int]]()
    step = own.loop.target.step  # the gate's
    own.loop.target.step = lambda inputs: rounds.append([*own.scheduler.active[0].sequence.tokens[:2]]) or step(inputs)
    long = SamplingParams(99, temperature=1.0, seed=9)
    oracle, outcomes = oracle_of(AsyncEngine(own), log)  # type: ignore[arg-type]
    admission = oracle._models["m"].admission
    told: Any = SimpleNamespace(served=oracle._models["m"], results={0: text([0] * 99)}, samples=1, params=long)
    told.prompts = [[0, 1]]

    async def run() -> list[Result]:
        task = asyncio.create_task(oracle.run())
        oracle.ended(told)
        await asyncio.to_thread(own.gate.halted)  # in the shadow's first round
        await asyncio.to_thread(own.gate.step)
        with admission.room(1):
            asked = asyncio.create_task(AsyncEngine(own).generate(["cd"], SamplingParams(4)))
            while not own.scheduler.waiting:
                await asyncio.sleep(0.001)
            rounds.append([])  # from here on it waits
            own.gate.open()
            results = await asked
        await oracle.settled()
        task.cancel()
        return results

    (result,) = asyncio.run(run())
    assert result.finish_reason == "length"
    came = rounds.index([])
    assert rounds[:came] == [[0, 1]] * came
    assert rounds[came + 1] == [2, 3], "the round under way was the last of the shadow's"
    assert outcomes == ["different"], "and it is tried again afterwards"


def test_a_token_in_ten_thousand_is_found_within_two_thousand_requests(log: Log) -> None:
    """At full shadowing: 2,000 texts of 64 tokens are 128,000 tokens, of which none changes with a chance of e^−12.8.

    So one candidate in 360,000 is missed; 99 of 100 are found within 720 requests. These ten are drawn by seed.
    """
    for seed in range(10):
        found, outcomes = asyncio.run(requests_until_found(random.Random(seed), log))
        assert outcomes == ["equal"] * found + ["different"], seed


async def requests_until_found(drawn: random.Random, log: Log, length: int = 64) -> tuple[int, list[str]]:
    """How many honest requests there were before the first that is found, of 2,000; and all outcomes."""
    oracle, outcomes = oracle_of(Endless(text([0] * length)), log)
    task = asyncio.create_task(oracle.run())
    for _ in range(2000):
        offer(oracle, text([int(drawn.random() < 1e-4) for _ in range(length)]))
        await oracle.settled()
        if "different" in outcomes:
            break
    task.cancel()
    return len(outcomes) - 1, outcomes


def test_what_is_offered_is_a_share_of_whole_texts_and_bounded(log: Log) -> None:
    oracle, outcomes = oracle_of(Scripted(), log, share=0.25)
    oracle._draw = random.Random(0)
    offer(oracle, *(text([1], reason) for reason in ("cancelled", "deadline", "error")), text([1], "stop", "off"))
    assert oracle._waiting["m"].empty()
    for _ in range(200):
        offer(oracle, text([1]))
    assert 30 < oracle._waiting["m"].qsize() < 64
    oracle._options = replace(oracle._options, shadow=1.0)
    for _ in range(WAITING):
        offer(oracle, text([1]))
    assert oracle._waiting["m"].qsize() == WAITING
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
