"""The router as Ray calls it: who is asked first, and what it learns from reports, ends and deaths."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import NamedTuple

import pytest

pytest.importorskip("ray.serve", reason="Ray is not installed")

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID

from specbuild.serve.ray.router import PrefixRouter

DEPLOYMENT = DeploymentID(name="Replica", app_name="specbuild")


def replica(name, blocks=None):
    stats = {} if blocks is None else {"cached": blocks}
    return SimpleNamespace(
        replica_id=ReplicaID(name, DEPLOYMENT),
        routing_stats=stats,
        node_id="n",
        availability_zone=None,
        multiplexed_model_ids=(),
    )


class Copied(NamedTuple):
    """A hint as it reaches the router: Ray copies modules by value, so its class is another one."""

    blocks: list[int]
    tokens: int
    output: int | None


def request(name, *args, hint=None):
    return SimpleNamespace(
        args=list(args),
        kwargs={"hint": hint} if hint else {},
        metadata=SimpleNamespace(internal_request_id=name),
        routing_context=SimpleNamespace(should_backoff=False),
    )


def first(router, replicas, asked):
    ranks = router.loop.run_until_complete(router.choose_replicas(replicas, asked))
    assert all(len(rank) == 1 for rank in ranks)
    return str(ranks[0][0].replica_id.unique_id)


@pytest.fixture
def router():
    made = PrefixRouter(deployment_id=DEPLOYMENT, handle_source=DeploymentHandleSource.UNKNOWN)
    made.initialize_state()
    made.loop = asyncio.new_event_loop()
    yield made
    made.loop.close()


def update(router, replicas):
    async def updated():
        router.update_replicas(replicas)

    router.loop.run_until_complete(updated())


def test_reports_requests_and_deaths_decide(router):
    replicas = [replica("a", [1]), replica("b", [1, 2])]
    update(router, replicas)
    asked = request("r", {}, b"", hint=Copied([1, 2, 3], 48, 8))
    assert first(router, replicas, asked) == "b"
    assert asked.routing_context.should_backoff, "else Ray tries again without a pause"
    router.on_request_routed(request("big", {}, b"", hint=Copied([1, 2], 32, 100)), replicas[1].replica_id, None)
    assert first(router, replicas, asked) == "a"
    router.on_request_completed(replicas[1].replica_id, "big")
    assert first(router, replicas, asked) == "b"
    router.on_replica_actor_died(replicas[1].replica_id)
    assert first(router, replicas[:1], asked) == "a"


def test_a_request_without_a_hint_goes_anywhere(router):
    replicas = [replica("a"), replica("b")]
    update(router, replicas)
    assert {first(router, replicas, asked) for asked in [request("r"), request("s", {}), None] * 10} == {"a", "b"}
    router.on_request_routed(request("r", {}), replicas[0].replica_id, None)
