"""The SLA guard on an engine: what it is told of, what it limits, what it says; and a load in earnest."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from serving import Log, Server

from benchmarks.serve import slo_step
from specbuild.runtime import Engine, Limits, RequestMetrics, Result, SamplingParams, SpeculationStats
from specbuild.serve import guard as guarding
from specbuild.serve.admission import Admission
from specbuild.serve.guard import Guard, within
from specbuild.serve.models import Models, ServedModel
from specbuild.serve.objectives import parse
from specbuild.serve.steering import Step


def guard_of(engine: Any, log: Log, clock: list[float]) -> tuple[Guard, CollectorRegistry]:
    model = ServedModel(("m",), Path("m"), SimpleNamespace(engine=engine), {}, Admission(1, 4))  # type: ignore[arg-type]
    registry = CollectorRegistry()
    return Guard(Models([model]), parse(["tpot=0.5,p99"]), registry, log, lambda: clock[0]), registry  # type: ignore[arg-type]


def ended(guard: Guard, tpot: float, now: float, count: int = 3) -> None:
    stats = SpeculationStats()
    stats.record(8, 2)
    times = {"submitted": now, "started": now, "first_token": now, "finished": now + 4 * tpot, "num_output_tokens": 5}
    metrics = RequestMetrics(1, 1, "auto", speculative_decoding=stats, **times)
    results = {each: Result("", [1] * 5, "length", metrics) for each in range(count)}
    results |= {9: Result("", [], "error", None)}
    guard.ended(SimpleNamespace(served=SimpleNamespace(name="m"), results=results))  # type: ignore[arg-type]


def test_it_limits_the_engine_says_why_and_counts(log: Log) -> None:
    clock, engine = [100.0], SimpleNamespace(limits=Limits(6, 1.5), timings=None, batch_size=1, correction=1.0)
    guard, registry = guard_of(engine, log, clock)
    guard.look()
    assert log.lines == []
    ended(guard, 2.0, 100.0)
    clock[0] = 110.0
    guard.look()
    assert engine.limits == Limits(4, 1.5), "half of what was drafted, and the operator's otherwise"
    (line,) = log.lines
    assert (line["level"], line["model"], line["max_draft_tokens"], line["cause"]) == ("info", "m", 4, "rounds")
    assert (line["slo_level"], line["objective"], line["tail"], line["seconds"]) == (1, "tpot_p99", 2.0, 0.5)
    told = {each.name: each.samples for each in registry.collect()}
    values = {(sample.name, sample.labels.get("objective")): sample.value for each in told.values() for sample in each}
    assert values["specbuild:slo_level", None] == values["specbuild:slo_changes_total", None] == 1
    assert values["specbuild:slo_attainment", "tpot_p99"] == 0.0


def test_the_operators_limits_are_never_passed() -> None:
    step = Step(1, 4, "")
    assert within(Limits(2), step) == Limits(2)
    assert within(Limits(), step) == Limits(4)
    assert within(Limits(9), Step(0, None, "")) == Limits(9)


def test_a_timing_table_says_what_plain_decoding_takes(log: Log) -> None:
    table = SimpleNamespace(at=lambda slots: SimpleNamespace(alone=0.25 * slots))
    engine = SimpleNamespace(limits=Limits(), timings=table, batch_size=4, correction=2.0)
    guard, _ = guard_of(engine, log, [0.0])
    assert guard.steering["m"]._plain() == 2.0


def test_the_operators_limits_are_left_behind_whatever_happens(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarding, "LOOK", 0.0)
    for fails in (False, True):
        engine = SimpleNamespace(limits=Limits(6), timings=None, batch_size=1, correction=1.0)
        guard, _ = guard_of(engine, log, [0.0])
        engine.limits = Limits(0)
        if fails:
            guard.steering["m"].look = lambda: 1 / 0  # type: ignore[assignment, method-assign]

        async def run(guard: Guard = guard) -> None:
            task = asyncio.create_task(guard.run())
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        asyncio.run(run())
        assert engine.limits == Limits(6)
    assert [line["message"] for line in log.lines] == ["the SLA guard ended by a bug: report it"]


def test_an_engine_decodes_within_what_it_says(engine: Engine, log: Log) -> None:
    """Its tokens are the same."""
    clock, asked = [100.0], SamplingParams(24, speculation="best:8", ignore_eos=True)
    guard, _ = guard_of(engine, log, clock)
    (before,) = engine.generate("def main(", asked)
    try:
        ended(guard, 2.0, 100.0)
        clock[0] = 110.0
        guard.look()
        (after,) = engine.generate("def main(", asked)
    finally:
        engine.limits = Limits()
    assert after.token_ids == before.token_ids
    told = after.metrics.speculative_decoding  # type: ignore[union-attr]
    assert 0 < told.num_draft_tokens <= 4 * told.num_spec_steps


@pytest.mark.slow
def test_a_server_tells_of_its_objectives(bundle: Path, tmp_path: Path) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text("port: 0\nslo: [ttft=30, 'tpot=1e-9,p50']\n")
    with Server(str(bundle), "--config", str(config)) as server, server.client() as client:
        for seed in range(12):
            asked = {"prompt": "def main(", "max_tokens": 24, "speculation": "best:8", "seed": seed}
            assert client.post("/v1/completions", json=asked).status_code == 200
        for _ in range(100):
            told = client.get("/metrics").text
            if 'slo_level{model_name="pycode"} 1.0' in told:
                break
            client.post("/v1/completions", json={"prompt": "import", "max_tokens": 2, "temperature": 0})
        assert 'specbuild:slo_changes_total{model_name="pycode"} 1.0' in told
        assert 'specbuild:slo_attainment{model_name="pycode",objective="ttft_p99"} 1.0' in told
        assert 'specbuild:slo_attainment{model_name="pycode",objective="tpot_p50"} 0.0' in told
    assert any(line["message"] == "the objective is broken: drafting less" for line in server.lines)


@pytest.mark.soak
def test_a_step_of_load_in_earnest(bundle: Path) -> None:
    """By the benchmark: p99 is below the objective again, and speculation comes back when the load has gone."""
    found = slo_step.step(bundle, quiet=20.0, busy=60.0, after=60.0)
    assert found["tail of the load, unguarded"] > found["objective"]
    assert found["tail, 20 s after the step on"] <= found["objective"]
    assert found["seconds until everything was drafted again"] is not None
