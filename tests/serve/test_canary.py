"""The canary: who takes part, what an arm sticks to, harm that rolls back, texts that are compared, orders."""

import asyncio
import random

import ended
import pytest

from specbuild.runtime.errors import OptionError
from specbuild.serve.canary.assignment import KEYS, CanaryOptions
from specbuild.serve.canary.canary import Canary
from specbuild.serve.request.fields import CompletionRequest
from specbuild.serve.request.models import Models


def canary_of(log, models=None, **options):
    given = {"candidate": "speculation=chain:4", "weight": 50} | options
    return Canary(models or ended.models("m", "other"), CanaryOptions(**given), log)


def assigned(canary, tenant=None, **fields):
    return canary.assign(canary.baseline, CompletionRequest(prompt="x", **fields), tenant)


def ends(canary, draw, *results, **more):
    canary.ended(ended.generation(canary.baseline, *results, draw=draw, **more))


def traffic(canary, count, slower=1.0, seed=1, **fields):
    """Requests, one after the other, until the canary has its phase or all are done; how many there were."""
    rng = random.Random(seed)
    for number in range(count):
        _, _, draw = assigned(canary, **fields)
        if draw is None:
            return number
        factor = slower if draw.candidate else 1.0
        text = ended.result(0.1 * factor * rng.lognormvariate(0, 0.3), 0.01 * factor * rng.lognormvariate(0, 0.3))
        ends(canary, draw, text)
        ended.settle(canary)
    return count


def counted(canary):
    """Requests whose first token is evidence."""
    return sum(next(each.n for each in canary.trial.evidence() if each.metric == "ttft"))


@pytest.mark.parametrize(
    ("candidate", "arms"),
    [
        ("speculation=auto", {"auto", "off"}),
        ("speculation=off", {"off", "auto"}),
        ("speculation=chain:2", {"chain:2", "off"}),
    ],
)
def test_speculation_is_tried_against_none(log, candidate, arms):
    canary = canary_of(log, candidate=candidate)
    assert {assigned(canary)[1] for _ in range(64)} == arms
    assert sum(canary.requests) == 64


def test_who_takes_part(log):
    canary = canary_of(log)
    other = ended.served("other")
    assert canary.assign(other, CompletionRequest(prompt="x"), None) == (other, None, None)
    for own in ({"speculation": "auto"}, {"disable_spec_decode": False}, {"num_speculative_tokens": 2}):
        assert assigned(canary, **own) == (canary.baseline, None, None), "what somebody chooses is left alone"
    bundles = canary_of(log, candidate="model=other")
    assert {assigned(bundles, speculation="off")[0].name for _ in range(64)} == {"m", "other"}
    assert assigned(bundles)[1] is None


@pytest.mark.parametrize("candidate", ["model=m", "model=x", "speculation=tree", "speculation=chain:8"])
def test_a_candidate_that_cannot_be_one(log, candidate):
    with pytest.raises(OptionError):
        canary_of(log, ended.models("m"), candidate=candidate)


def test_a_session_keeps_its_bundle_in_every_server_and_counts_once(log):
    """A user does where there is no session; a tenant's names are its own."""
    servers = [canary_of(log, candidate="model=other") for _ in range(2)]
    for names in ({"session": "s"}, {"user": "u"}, {"session": "s", "user": "u"}):
        drawn = [assigned(server, "t", **names)[2] for server in servers for _ in range(8)]
        assert len({draw.candidate for draw in drawn}) == 1
    fresh = canary_of(log, candidate="model=other")
    draws = [assigned(fresh, tenant, session="s")[2] for tenant in "ab" * 4]
    assert [draw.fresh for draw in draws] == [True, True] + [False] * 6
    assert len({assigned(fresh, str(number), session="s")[2].candidate for number in range(64)}) == 2
    for number in range(KEYS):
        assigned(fresh, session=str(number))
    assert assigned(fresh, "a", session="s")[2].fresh, "the oldest goes"


def test_a_session_may_change_its_arm_where_no_text_depends_on_it(log):
    canary = canary_of(log)
    draws = [assigned(canary, session="s")[2] for _ in range(64)]
    assert {draw.candidate for draw in draws} == {False, True}
    assert all(draw.fresh for draw in draws)


@pytest.mark.parametrize("action", ["rollback", "none"])
def test_a_slower_candidate_is_rolled_back_where_that_is_an_option(log, action):
    canary = canary_of(log, action=action)
    count = traffic(canary, 300, slower=2.0)
    assert canary.trial.harmful
    (line,) = [line for line in log.lines if line["level"] == "error"]
    assert line["metric"] in ("ttft", "tokens_per_second")
    assert line["e"] >= 20
    if action == "none":
        assert (canary.phase, count) == ("running", 300)
    else:
        assert (canary.phase, canary.weight, count < 200) == ("rolled back", 0, True)
        assert assigned(canary) == (canary.baseline, "off", None)


def test_what_is_ignored_decides_nothing(log):
    canary = canary_of(log, ignore=("ttft", "tokens_per_second"))
    assert traffic(canary, 100, slower=3.0) == 100
    assert [each.metric for each in canary.trial.evidence()] == ["errors"]


def test_later_requests_of_a_key_and_those_that_clients_spoiled_are_no_evidence(log):
    canary = canary_of(log, candidate="model=other")
    traffic(canary, 10, session="s")
    assert counted(canary) == 1
    ends(canary, assigned(canary)[2], ended.result(), status=400)
    ended.settle(canary)
    assert counted(canary) == 1


def test_orders_end_it_and_begin_it_anew(log):
    canary = canary_of(log)
    traffic(canary, 300, slower=2.0)
    canary.turn("promoted")
    assert (canary.weight, assigned(canary)) == (100, (canary.baseline, "chain:4", None))
    canary.turn("running")
    assert (canary.weight, canary.trial.harmful, counted(canary), canary.requests) == (50, False, 0, [0, 0])
    assert traffic(canary, 300, slower=2.0) < 300
    assert canary.phase == "rolled back"


def test_a_text_that_speculation_changed_rolls_back_and_one_of_another_bundle_is_counted(log):
    for candidate, phase in (("speculation=auto", "rolled back"), ("model=other", "running")):
        canary = canary_of(log, candidate=candidate)
        canary.compared("equal")
        assert canary.phase == "running"
        canary.compared("different")
        assert (canary.phase, canary.view()["texts"]) == (phase, {"equal": 1, "different": 1})


def test_texts_of_other_tokenizers_are_not_compared(log):
    models = Models([ended.served("m"), ended.served("other", tokenizer="u")])
    assert canary_of(log, candidate="model=other").compares_texts
    assert not canary_of(log, models, candidate="model=other").compares_texts


def test_a_canary_that_fails_is_rolled_back(log, monkeypatch):
    canary = canary_of(log)
    monkeypatch.setattr(canary.trial, "add", lambda *given: 1 / 0)
    ends(canary, assigned(canary)[2], ended.result())

    async def run():
        with pytest.raises(ZeroDivisionError):
            await canary.run()

    asyncio.run(asyncio.wait_for(run(), 30))
    assert (canary.phase, assigned(canary)[1]) == ("rolled back", "off")
