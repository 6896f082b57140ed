"""One judge for all replicas: sessions keep their arm wherever they go, and one verdict comes of what all report."""

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("ray.serve", reason="Ray is not installed")

import ended
from ray.exceptions import RayActorError
from serving import Log, running

from specbuild.runtime import LoadOptions
from specbuild.serve.canary.assignment import CanaryOptions
from specbuild.serve.options import ServeOptions
from specbuild.serve.ray import remote_bundle
from specbuild.serve.ray.canary import JudgeReplica, ReplicaCanary
from specbuild.serve.request.fields import CompletionRequest

MODELS = ended.models("m")
(BASELINE,) = MODELS.all


class Handle:
    """What Ray's handle does, in this process; `fails`: the actor is gone."""

    def __init__(self, judge):
        self.judge = judge

    def __getattr__(self, name):
        async def call(*given):
            if self.judge is None:
                raise RayActorError
            return await getattr(self.judge, name)(*given)

        return SimpleNamespace(remote=lambda *given: asyncio.ensure_future(call(*given)))


def canary_options(**more):
    return ServeOptions(canary=CanaryOptions(candidate="speculation=chain:4", weight=50, max_weight=50, **more))


async def judge_of(bundle, options):
    made = object.__new__(JudgeReplica)
    await JudgeReplica.__init__(made, ([(("m",), remote_bundle.source(str(bundle)))], options, LoadOptions()))
    return made


def body(**given):
    return CompletionRequest(prompt="x", **given)


@pytest.fixture
def replicas_of(bundle, log):
    """`await replicas_of(**CanaryOptions)`: a judge, and two replicas that ask it."""

    async def make(**more):
        options = canary_options(**more)
        judge = await judge_of(bundle, options)
        handle = Handle(judge)
        return judge, [ReplicaCanary(MODELS, options, log, handle) for _ in range(2)]

    return make


def test_a_session_keeps_its_arm_in_every_replica_and_counts_once(replicas_of):
    async def work():
        judge, replicas = await replicas_of()
        for session in map(str, range(12)):
            turns = [replica for _ in range(3) for replica in replicas]
            found = [await each.arm(BASELINE, body(session=session), None) for each in turns]
            assert len({way for _, way, _ in found}) == 1
            assert [draw.fresh for _, _, draw in found if draw] == [True] + [False] * 5
            assert len({draw.number for _, _, draw in found if draw}) == 6
        status, view = await judge.ask(None)
        assert (status, sum(view["requests"].values())) == (200, 72)

    asyncio.run(work())


def test_one_verdict_comes_of_what_all_report(replicas_of, bundle, tmp_path):
    """And the state survives the judge."""

    async def work():
        state = tmp_path / "canary.json"
        judge, replicas = await replicas_of(state=state)
        async with running(*(each.run() for each in replicas)):
            for number in range(2000):
                replica = replicas[number % 2]
                model, way, draw = await replica.arm(BASELINE, body(), None)
                slow = 2.0 if way else 1.0
                replica.ended(ended.generation(model, ended.result(0.1 * slow, 0.01 * slow), draw=draw))
                await asyncio.sleep(0)
                if (await judge.ask(None))[1]["phase"] == "rolled back":
                    break
            assert await replicas[0].arm(BASELINE, body(), None) == (BASELINE, None, None)
            assert 'specbuild:canary_verdict{model_name="m",verdict="rollback"} 1.0' in await judge.metrics()
        await judge.__del__()
        again = await judge_of(bundle, canary_options(state=state))
        assert (await again.ask(None))[1]["phase"] == "rolled back"

    asyncio.run(work())


@pytest.mark.parametrize("silent", [False, True])
def test_without_a_judge_requests_run_as_they_ask(silent):
    async def work():
        log, sleeping = Log(), SimpleNamespace(draw=SimpleNamespace(remote=lambda *_: asyncio.sleep(9)))
        handle = sleeping if silent else Handle(None)
        replica = ReplicaCanary(MODELS, canary_options(), log, handle, seconds=0.05)
        assert await replica.arm(BASELINE, body(), None) == (BASELINE, None, None)
        assert log.lines[-1]["message"] == "the canary's judge does not answer"
        before = len(log.lines)
        for _ in range(20):
            assert await replica.arm(BASELINE, body(), None) == (BASELINE, None, None)
        assert len(log.lines) == before, "only the first waits for a judge that is gone"

    asyncio.run(work())


def test_a_judge_that_comes_back_is_asked_again(bundle):
    async def work():
        log, handle, options = Log(), Handle(None), canary_options()
        given = log, handle
        replica = ReplicaCanary(MODELS, options, *given)
        assert await replica.arm(BASELINE, body(), None) == (BASELINE, None, None)
        handle.judge = await judge_of(bundle, options)
        async with running(replica.run()):
            while log.lines[-1]["message"] != "the canary's judge answers again":
                await asyncio.sleep(0.05)
        assert (await replica.arm(BASELINE, body(), None))[2]

    asyncio.run(asyncio.wait_for(work(), 30))
