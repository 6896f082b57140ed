"""The canary: draws, evidence in the order of arrival, verdicts that act, steps, and a state that survives."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import ended
import pytest
from serving import Log

from specbuild.runtime.errors import OptionError
from specbuild.serve import judge as module
from specbuild.serve.arms import CanaryOptions
from specbuild.serve.canary import Canary
from specbuild.serve.fields import CompletionRequest
from specbuild.serve.models import Models
from specbuild.serve.scoring import Score

CANDIDATE = "speculation=chain:4"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def canary_of(log: Log, tenants: int = 0, models: Models | None = None, clock: Any = None, **given: Any) -> Canary:
    options = CanaryOptions(**{"candidate": CANDIDATE, "weight": 50} | given)
    canary = Canary(models or ended.models("m", "other"), options, log, tenants, clock or Clock())  # type: ignore[arg-type]
    canary.draws.salt = "salt"
    return canary


def body(**given: Any) -> CompletionRequest:
    return CompletionRequest(prompt="x", **given)


def traffic(canary: Canary, count: int, slower: float = 1.0, seed: int = 1, **given: Any) -> int:
    """Requests, one after the other, until the canary has its phase or all are done; how many there were."""
    rng = random.Random(seed)
    for number in range(count):
        model, _, draw = canary.assign(canary.baseline, body(**given), None)
        if draw is None:
            return number
        factor = slower if draw.candidate else 1.0
        text = ended.result(0.1 * factor * rng.lognormvariate(0, 0.3), 0.01 * factor * rng.lognormvariate(0, 0.3))
        canary.ended(ended.generation(model, text, draw=draw))
        ended.settle(canary)
    return count


def test_who_takes_part(log: Log) -> None:
    canary = canary_of(log, baseline="speculation=off")
    m, other = canary.baseline, ended.served("other")
    ways = {canary.assign(m, body(), None)[1] for _ in range(64)}
    assert ways == {"chain:4", "off"}
    assert canary.assign(other, body(), None) == (other, None, None)
    for asked in ({"speculation": "auto"}, {"disable_spec_decode": False}, {"num_speculative_tokens": 2}):
        assert canary.assign(m, body(**asked), None) == (m, None, None), "what somebody asks for is left alone"
    assert sum(canary.requests) == 64


@pytest.mark.parametrize(
    ("given", "tenants", "sticks"),
    [
        ({"session": "s"}, 0, True),
        ({"user": "u"}, 0, True),
        ({}, 2, True),
        ({}, 1, False),
        ({}, 0, False),
    ],
)
def test_what_an_arm_sticks_to(log: Log, given: dict[str, str], tenants: int, sticks: bool) -> None:
    canary = canary_of(log, tenants)
    drawn = [canary.assign(canary.baseline, body(**given), "t")[2] for _ in range(64)]
    assert len({draw.candidate for draw in drawn if draw}) == (1 if sticks else 2)
    assert sum(draw.fresh for draw in drawn if draw) == (1 if sticks else 64)
    lone = canary_of(log, tenants, sticky="request")
    assert len({lone.assign(lone.baseline, body(**given), "t")[2].candidate for _ in range(64)}) == 2  # type: ignore[union-attr]


def test_another_bundle_takes_its_share_of_the_baselines_requests(log: Log) -> None:
    canary = canary_of(log, candidate="model=b", models=ended.models("a", "b"))
    a, b = canary.baseline, canary.candidate
    found = [canary.assign(a, body(speculation="off"), None) for _ in range(64)]
    assert {model.name for model, _, _ in found} == {"a", "b"}
    assert {way for _, way, _ in found} == {None}
    assert canary.assign(b, body(), None) == (b, None, None), "named by the client"


@pytest.mark.parametrize(
    ("action", "phase"), [("rollback", "rolled back"), ("both", "rolled back"), ("promote", "running")]
)
def test_a_slower_candidate_is_rolled_back_where_that_is_asked_for(log: Log, action: str, phase: str) -> None:
    canary = canary_of(log, action=action)
    count = traffic(canary, 300, slower=2.0)
    assert canary.phase == phase
    assert canary.verdict is not None
    assert canary.verdict.kind == "rollback"
    (line,) = [line for line in log.lines if line["level"] == "error"]
    assert line["metric"] in ("ttft", "tpot", "e2el")
    assert line["candidate_mean"] > line["baseline_mean"]
    assert line["e"] >= 20
    if phase == "rolled back":
        assert count < 200
        assert canary.weight == 0
        assert canary.assign(canary.baseline, body(), None) == (canary.baseline, None, None)


def test_a_good_one_is_promoted_where_that_is_asked_for(log: Log) -> None:
    canary = canary_of(log, action="promote", margin=0.5)
    traffic(canary, 1500, slower=0.7)
    assert (canary.phase, canary.weight) == ("promoted", 100)
    assert canary.assign(canary.baseline, body(), None)[1:] == ("chain:4", None)
    assert [line["message"] for line in log.lines] == ["the canary's verdict is promote", "the canary is promoted"]


def test_harm_that_is_proven_after_a_promote_verdict_still_rolls_back(log: Log) -> None:
    canary = canary_of(log, margin=0.5)
    traffic(canary, 1000, slower=0.8)
    assert canary.verdict is not None
    assert (canary.verdict.kind, canary.phase) == ("promote", "running")
    traffic(canary, 3000, slower=3.0, seed=2)
    assert canary.phase == "rolled back"


def test_requests_count_in_the_order_they_came_in(log: Log) -> None:
    canary = canary_of(log)
    draws = [canary.assign(canary.baseline, body(), None)[2] for _ in range(4)]
    for place in (2, 1):
        canary.ended(ended.generation(canary.baseline, ended.result(), draw=draws[place]))
    ended.settle(canary)
    assert _count(canary) == 0, "the first has not ended"
    canary.ended(ended.generation(canary.baseline, status=400, draw=draws[0]))
    ended.settle(canary)
    assert _count(canary) == 2, "the first says nothing, and lets the others pass"


def test_one_that_never_ends_holds_up_only_so_many(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELD", 8)
    canary = canary_of(log)
    first, *others = (canary.assign(canary.baseline, body(), None)[2] for _ in range(20))
    for draw in others:
        canary.ended(ended.generation(canary.baseline, ended.result(), draw=draw))
    ended.settle(canary)
    assert _count(canary) == 19
    canary.ended(ended.generation(canary.baseline, ended.result(), draw=first))
    assert not canary._held, "it comes too late"


def test_later_requests_of_a_session_are_no_evidence(log: Log) -> None:
    canary = canary_of(log)
    traffic(canary, 10, session="s")
    assert (_count(canary), sum(canary.requests)) == (1, 10)


def test_an_objective_rolls_back_though_the_baseline_breaks_it_too(log: Log) -> None:
    canary = canary_of(log, objective=("ttft=0.05,p90",))
    traffic(canary, 200)
    assert canary.phase == "rolled back"
    assert canary.verdict is not None
    assert canary.verdict.evidence.metric == "ttft_p90<=0.05"
    assert min(canary.verdict.evidence.means) > 0.9  # type: ignore[type-var]
    kept = canary_of(log, objective=("ttft=5,p90", "errors=0.1"), action="promote", margin=0.5)
    traffic(kept, 1500, slower=0.7)
    assert kept.phase == "promoted"


def _count(canary: Canary) -> int:
    return sum(next(each.n for each in canary.trial.evidence() if each.metric == "ttft"))


def test_the_weight_steps_unless_paused(log: Log) -> None:
    clock = Clock()
    canary = canary_of(log, weight=10, step_weight=15, max_weight=30, interval=60, clock=clock)
    weights = []
    for _ in range(4):
        clock.now += 61
        canary.tick()
        weights.append(canary.weight)
    assert weights == [25, 30, 30, 30]
    canary = canary_of(log, weight=10, clock=clock)
    canary.turn("paused")
    clock.now += 61
    canary.tick()
    assert canary.weight == 10
    canary.turn("running")
    clock.now += 61
    canary.tick()
    assert canary.weight == 20


def test_a_pause_holds_a_verdict_back_until_it_ends(log: Log) -> None:
    canary = canary_of(log)
    canary.turn("paused")
    traffic(canary, 200, slower=2.0)
    assert canary.phase == "paused"
    canary.turn("running")
    assert canary.phase == "rolled back"


def test_a_restart_goes_on(log: Log, tmp_path: Path) -> None:
    state = tmp_path / "canary.json"
    canary = canary_of(log, state=state)
    traffic(canary, 40)
    canary.turn("paused")
    again = canary_of(log, state=state)
    assert again.view() == canary.view()
    traffic(again, 40)
    assert _count(again) == 80
    again.turn("rolled back")
    assert canary_of(log, state=state).phase == "rolled back"
    with pytest.raises(OptionError, match="something else"):
        canary_of(log, state=state, alpha=0.01)


def test_a_session_that_was_seen_before_a_restart_counts_no_more(log: Log, tmp_path: Path) -> None:
    for count in (1, 1, 0):
        canary = canary_of(log, state=tmp_path / "canary.json")
        traffic(canary, 3, session="s" if count else "t")
    assert _count(canary) == 2, "one of each session"


@pytest.mark.parametrize(
    ("name", "value"), [("weight", 101), ("phase", "gone"), ("trial", {}), ("draws", -1), ("verdict", 1)]
)
def test_a_state_that_is_none_is_refused(log: Log, tmp_path: Path, name: str, value: Any) -> None:
    state = tmp_path / "canary.json"
    canary_of(log, state=state).save()
    state.write_text(json.dumps(json.loads(state.read_text()) | {name: value}))
    with pytest.raises(OptionError, match="is no state"):
        canary_of(log, state=state)


def test_a_verdict_survives_and_a_state_that_cannot_be_written_is_told(log: Log, tmp_path: Path) -> None:
    state = tmp_path / "folder" / "canary.json"
    state.parent.mkdir()
    canary = canary_of(log, state=state)
    traffic(canary, 300, slower=2.0)
    assert canary_of(log, state=state).verdict == canary.verdict
    state.unlink()
    state.parent.rmdir()
    canary.save()
    assert log.lines[-1]["message"] == "the canary's state could not be written"


def test_quality_is_evidence_between_bundles(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    canary = canary_of(log, candidate="model=b", models=ended.models("a", "b"))
    scorer, rng = canary._scorer, random.Random(3)
    assert scorer is not None
    bad: list[bool] = []

    def offer(prompt: list[int], tokens: list[int], tell: Any) -> bool:
        tell(Score(rng.gauss(-2.0 if bad[-1] else -1.0, 0.3), 1.0, 0.25))
        return True

    monkeypatch.setattr(scorer, "offer", offer)
    for _ in range(200):
        model, _, draw = canary.assign(canary.baseline, body(), None)
        if draw is None:
            break
        bad.append(draw.candidate)
        canary.ended(ended.generation(model, ended.result(), draw=draw))
        ended.settle(canary)
    assert canary.phase == "rolled back"
    assert canary.verdict is not None
    assert canary.verdict.evidence.metric == "quality"
    assert canary.view()["divergence"]["kl"] == pytest.approx(0.25)


def test_it_runs_until_it_is_cancelled_and_saves(log: Log, tmp_path: Path) -> None:
    state = tmp_path / "canary.json"
    canary = canary_of(log, state=state)

    async def run() -> None:
        task = asyncio.create_task(canary.run())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    assert json.loads(state.read_text())["phase"] == "running"


@pytest.mark.soak
def test_twenty_planted_and_sixty_equal_runs(log: Log) -> None:
    """The bars by the server's own class: requests one a second, steps of a minute."""

    def phase(slower: float, seed: int) -> str:
        clock = Clock()
        canary = canary_of(log, weight=10, clock=clock)
        canary.draws.salt, rng = str(seed), random.Random(seed)
        for _ in range(2000):
            clock.now += 1
            model, _, draw = canary.assign(canary.baseline, body(), None)
            if draw is None:
                break
            factor = slower if draw.candidate else 1.0
            heavy = rng.expovariate(1.0) if rng.random() < 0.03 else 0.0
            ttft, tpot = (factor * rng.lognormvariate(heavy, 0.3) for _ in range(2))
            text = ended.result(0.1 * ttft, 0.02 * tpot, rng.randint(2, 200))
            canary.ended(ended.generation(model, text, draw=draw))
            ended.settle(canary)
            canary.tick()
        return canary.phase

    assert [phase(1.1, seed) for seed in range(20)].count("rolled back") >= 19
    assert [phase(1.0, 1000 + seed) for seed in range(60)].count("rolled back") <= 3
