"""The SLA guard on an engine: what it is told of, what it limits, what it says; and a load in earnest."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import ended
import pytest
from prometheus_client import CollectorRegistry
from serving import running

from benchmarks.serve import slo_step
from specbuild.runtime import Limits, RequestMetrics, Result, SpeculationStats
from specbuild.serve.request.admission import Admission
from specbuild.serve.request.models import Models, ServedModel
from specbuild.serve.slo.draft_throttle import Step
from specbuild.serve.slo.objectives import parse
from specbuild.serve.slo.slo_controller import Guard, within


def plain(**more):
    """As much of an engine as a guard needs."""
    return SimpleNamespace(**{"limits": Limits(6, 1.5), "timings": None, "batch_size": 1, "correction": 1.0} | more)


class Guarded:
    """A guard of one model, at times of a test's own."""

    def __init__(self, engine, log):
        twin = SimpleNamespace(engine=engine)
        self.model = ServedModel(("m",), Path("m"), twin, {}, Admission(1, 4))
        self.registry, self.now, slo = CollectorRegistry(), 100.0, parse(["tpot=0.5,p99"])
        self.guard = Guard(Models([self.model]), slo, self.registry, log, lambda: self.now, look_seconds=0.0)

    def slow(self):
        """Texts that took two seconds a token, and ten seconds later a look."""
        stats = SpeculationStats()
        stats.record(8, 2)
        times = {"submitted": self.now, "started": self.now, "first_token": self.now, "finished": self.now + 8.0}
        metrics = RequestMetrics(1, 1, "auto", speculative_decoding=stats, num_output_tokens=5, **times)
        results = [Result("", [1] * 5, "length", metrics)] * 3
        self.guard.ended(ended.generation(self.model, *results, Result("", [], "error", None)))
        self.now += 10.0
        self.guard.look()


def test_it_limits_the_engine_says_why_and_counts(log):
    guarded = Guarded(engine := plain(), log)
    guarded.guard.look()
    assert log.lines == []
    guarded.slow()
    assert engine.limits == Limits(4, 1.5), "half of what was drafted, and the operator's otherwise"
    (line,) = log.lines
    assert {"level": "info", "model": "m", "max_draft_tokens": 4, "cause": "rounds"}.items() <= line.items()
    assert {"objective": "tpot_p99", "tail": 2.0, "seconds": 0.5, "slo_level": 1}.items() <= line.items()
    values = {sample.name: sample.value for each in guarded.registry.collect() for sample in each.samples}
    assert [values[f"specbuild:slo_{name}"] for name in ("level", "changes_total", "attainment")] == [1, 1, 0]


@pytest.mark.parametrize(("own", "level", "found"), [(2, 4, 2), (None, 4, 4), (9, None, 9)])
def test_the_operators_limits_are_never_passed(own, level, found):
    assert within(Limits(own), Step(1, level, "")) == Limits(found)


@pytest.mark.parametrize("alone", [0.1, 4.0])
def test_a_timing_table_says_what_plain_decoding_takes(log, alone):
    """Where that is slower than the objective, nothing is gained by drafting less."""
    table = SimpleNamespace(at=lambda slots: SimpleNamespace(alone=alone))
    guarded = Guarded(engine := plain(timings=table), log)
    guarded.slow()
    assert (engine.limits == Limits(6, 1.5)) == (alone > 2)


@pytest.mark.parametrize("fails", [False, True])
def test_the_operators_limits_are_left_behind_whatever_happens(log, monkeypatch, fails):
    guarded = Guarded(engine := plain(), log)
    engine.limits = Limits(0)
    if fails:
        monkeypatch.setattr("specbuild.serve.slo.draft_throttle.Steering.look", lambda _: 1 / 0)

    async def run():
        async with running(guarded.guard.run()):
            await asyncio.sleep(0.01)

    asyncio.run(run())
    assert engine.limits == Limits(6, 1.5)


@pytest.mark.soak
def test_a_step_of_load_in_earnest(bundle):
    """By the benchmark: p99 is below the objective again, and speculation comes back when the load has gone."""
    found = slo_step.step(bundle, quiet=20.0, busy=60.0, after=60.0)
    assert found["tail of the load, unguarded"] > found["objective"]
    assert found["tail, 20 s after the step on"] <= found["objective"]
    assert found["seconds until everything was drafted again"] is not None
