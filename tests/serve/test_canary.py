"""The canary: draws, evidence in the order of arrival, verdicts that act, steps, and a state that survives."""

import asyncio
import json
import random
import threading

import ended
import pytest
from serving import running

from specbuild.runtime.errors import OptionError
from specbuild.serve import state_file
from specbuild.serve.canary.assignment import CanaryOptions
from specbuild.serve.canary.canary import Canary
from specbuild.serve.request.fields import CompletionRequest


def canary_of(log, tenants=0, models=None, clock=None, **given):
    options = CanaryOptions(**{"candidate": "speculation=chain:4", "weight": 50} | given)
    clock = clock or [0.0]
    canary = Canary(models or ended.models("m", "other"), options, log, tenants, lambda: clock[0])
    canary.draws.salt = "salt"
    return canary


def assigned(canary, tenant=None, **fields):
    return canary.assign(canary.baseline, CompletionRequest(prompt="x", **fields), tenant)


def ends(canary, draw, *results, model=None, **more):
    canary.ended(ended.generation(model or canary.baseline, *results, draw=draw, **more))


def traffic(canary, count, slower=1.0, seed=1, **given):
    """Requests, one after the other, until the canary has its phase or all are done; how many there were."""
    rng = random.Random(seed)
    for number in range(count):
        model, _, draw = assigned(canary, **given)
        if draw is None:
            return number
        factor = slower if draw.candidate else 1.0
        text = ended.result(0.1 * factor * rng.lognormvariate(0, 0.3), 0.01 * factor * rng.lognormvariate(0, 0.3))
        ends(canary, draw, text, model=model)
        ended.settle(canary)
    return count


def counted(canary):
    """Requests whose first token is evidence."""
    return sum(next(each.n for each in canary.trial.evidence() if each.metric == "ttft"))


def test_who_takes_part(log):
    canary = canary_of(log, baseline="speculation=off")
    m, other = canary.baseline, ended.served("other")
    assert {assigned(canary)[1] for _ in range(64)} == {"chain:4", "off"}
    assert canary.assign(other, CompletionRequest(prompt="x"), None) == (other, None, None)
    for asked in ({"speculation": "auto"}, {"disable_spec_decode": False}, {"num_speculative_tokens": 2}):
        assert assigned(canary, **asked) == (m, None, None), "what somebody asks for is left alone"
    assert sum(canary.requests) == 64


@pytest.mark.parametrize(
    ("given", "tenants", "sticky", "sticks"),
    [
        *(({"session": "s"}, 0, "session", True), ({"user": "u"}, 0, "session", True), ({}, 2, "session", True)),
        *(({}, 1, "session", False), ({"session": "s"}, 2, "request", False)),
    ],
)
def test_what_an_arm_sticks_to(log, given, tenants, sticky, sticks):
    canary = canary_of(log, tenants, sticky=sticky)
    drawn = [assigned(canary, "t", **given)[2] for _ in range(64)]
    assert len({draw.candidate for draw in drawn}) == (1 if sticks else 2)
    assert sum(draw.fresh for draw in drawn) == (1 if sticks else 64)


@pytest.mark.parametrize("action", ["rollback", "none"])
def test_a_slower_candidate_is_rolled_back_where_that_is_asked_for(log, action):
    canary = canary_of(log, action=action)
    count = traffic(canary, 300, slower=2.0)
    assert canary.verdict
    assert canary.verdict.kind == "rollback"
    (line,) = [line for line in log.lines if line["level"] == "error"]
    assert line["metric"] in ("ttft", "tpot", "e2el")
    assert line["candidate_mean"] > line["baseline_mean"]
    assert line["e"] >= 20
    if action == "none":
        assert canary.phase == "running"
    else:
        assert (canary.phase, canary.weight, count < 200) == ("rolled back", 0, True)
        assert assigned(canary) == (canary.baseline, None, None)


@pytest.mark.slow
def test_a_good_one_is_found_and_promoted_by_an_operator_alone(log):
    canary = canary_of(log, margin=0.5, objective=("ttft=5,p90", "errors=0.1"))
    traffic(canary, 1500, slower=0.7)
    assert canary.verdict
    assert (canary.verdict.kind, canary.phase) == ("promote", "running")
    canary.turn("promoted")
    assert (canary.weight, assigned(canary)[1:]) == (100, ("chain:4", None))
    assert [line["message"] for line in log.lines] == ["the canary's verdict is promote", "the canary is promoted"]


def test_requests_count_in_the_order_they_came_in(log):
    canary = canary_of(log)
    draws = [assigned(canary)[2] for _ in range(4)]
    for ending, counts in (((2, 1), 0), ((0, 1), 2)):  # the first says nothing, and lets the others pass
        for place in ending:
            ends(canary, draws[place], ended.result(), status=400 if place == 0 else 200)
        ended.settle(canary)
        assert counted(canary) == counts, "none counts twice"


def test_one_that_never_ends_holds_up_only_so_many(log):
    canary = canary_of(log)
    first, *others = (assigned(canary)[2] for _ in range(2000))
    for draw in (*others, first):
        ends(canary, draw, ended.result())
    ended.settle(canary)
    assert counted(canary) == 1999, "the first comes too late"


def test_the_weight_steps_unless_paused_which_holds_a_verdict_back(log):
    clock = [0.0]
    canary = canary_of(log, weight=10, step_weight=25, max_weight=50, interval=60, clock=clock)

    def later():
        clock[0] += 61
        canary.tick()
        return canary.weight

    canary.turn("paused")
    assert later() == 10
    canary.turn("running")
    assert [later() for _ in range(3)] == [35, 50, 50]
    canary.turn("paused")
    traffic(canary, 200, slower=2.0)
    assert canary.phase == "paused"
    canary.turn("running")
    assert canary.phase == "rolled back"


def test_a_restart_goes_on(log, tmp_path):
    """Later requests of a session are no evidence, neither before it nor after."""
    state = tmp_path / "canary.json"
    canary = canary_of(log, state=state)
    traffic(canary, 40)
    traffic(canary, 10, session="s")
    assert (counted(canary), sum(canary.requests)) == (41, 50)
    canary.turn("paused")
    canary.save()
    again = canary_of(log, state=state)
    assert again.view() == canary.view()
    traffic(again, 40)
    traffic(again, 3, session="s")
    assert counted(again) == 81
    again.turn("running")
    traffic(again, 300, slower=2.0)
    again.save()
    last = canary_of(log, state=state)
    assert (last.phase, last.verdict) == ("rolled back", again.verdict)
    with pytest.raises(OptionError, match="something else"):
        canary_of(log, state=state, alpha=0.01)


@pytest.mark.parametrize(
    ("name", "value"), [("weight", 101), ("phase", "gone"), ("trial", {}), ("draws", -1), ("verdict", 1)]
)
def test_a_state_that_is_none_is_refused(log, tmp_path, name, value):
    state = tmp_path / "canary.json"
    canary_of(log, state=state).save()
    state.write_text(json.dumps(json.loads(state.read_text()) | {name: value}))
    with pytest.raises(OptionError, match="is no state"):
        canary_of(log, state=state)


def test_a_state_that_cannot_be_written_is_told(log, tmp_path):
    state = tmp_path / "folder" / "canary.json"
    state.parent.mkdir()
    canary = canary_of(log, state=state)
    state.parent.rmdir()
    canary.save()
    assert log.lines[-1]["message"] == "the canary's state could not be written"


def test_it_saves_when_it_is_cancelled(log, tmp_path):
    async def run():
        async with running(canary_of(log, state=tmp_path / "canary.json").run()):
            await asyncio.sleep(0)

    asyncio.run(run())
    assert json.loads((tmp_path / "canary.json").read_text())["phase"] == "running"


def test_a_turn_is_written_soon_and_not_by_the_loop(log, tmp_path, monkeypatch):
    state, threads, canary_run = tmp_path / "canary.json", list[int](), canary_of(log, state=tmp_path / "canary.json")
    store = state_file.store

    def spy(*given):
        threads.append(threading.get_ident())
        store(*given)

    async def run():
        async with running(canary_run.run()):
            canary_run.turn("paused")
            while not state.exists():
                await asyncio.sleep(0.01)
            assert threading.get_ident() not in threads

    monkeypatch.setattr(state_file, "store", spy)
    asyncio.run(asyncio.wait_for(run(), 30))
    assert json.loads(state.read_text())["phase"] == "paused"


def test_a_canary_whose_judge_fails_is_rolled_back(log, monkeypatch):
    canary = canary_of(log)
    monkeypatch.setattr(canary.trial, "add", lambda *given: 1 / 0)
    _, _, draw = assigned(canary)
    ends(canary, draw, ended.result())

    async def run():
        with pytest.raises(ZeroDivisionError):
            await canary.run()

    asyncio.run(asyncio.wait_for(run(), 30))
    assert (canary.phase, assigned(canary)) == ("rolled back", (canary.baseline, None, None))
