"""Ray Serve's request router by prefix; `prefixes` decides."""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .prefixes import Places, Routing

CACHED = "cached"  # key of a replica's routing stats: the blocks that its cache holds


class Hint(NamedTuple):
    """A request as the router knows it: its prompt's blocks, its tokens, and the output tokens asked for, if any."""

    blocks: list[int]
    tokens: int
    output: int | None


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Prefers the replica that holds a prompt's beginning. Requests have a `Hint` as their argument `hint`."""

    def initialize_state(self, routing: Routing = "prefix", slots: int = 0) -> None:
        """See `RequestRouter`, and `Places`."""
        self._places, self._told = Places(Random(), routing, slots), dict[ReplicaID, Any]()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """See `RequestRouter`; draining replicas are not among them."""
        self._places.keep(each.replica_id for each in replicas)
        self._told = {each.replica_id: self._told.get(each.replica_id) for each in replicas}
        for each in replicas:
            blocks = each.routing_stats.get(CACHED)
            if blocks is not None and blocks is not self._told[each.replica_id]:
                self._told[each.replica_id] = blocks
                self._places.report(each.replica_id, blocks)
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """See `RequestRouter`."""
        self._places.drop(replica_id)
        super().on_replica_actor_died(replica_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """See `RequestRouter`; one replica per rank, the best first."""
        if pending_request:
            pending_request.routing_context.should_backoff = True
        by_id = {each.replica_id: each for each in candidate_replicas}
        hint = _hint(pending_request)
        return [[by_id[each]] for each in self._places.choose(list(by_id), hint.blocks if hint else [])]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """See `RequestRouter`."""
        if hint := _hint(pending_request):
            self._places.sent(replica_id, pending_request.metadata.internal_request_id, *hint)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """See `RequestRouter`."""
        self._places.ended(replica_id, internal_request_id)


def _hint(request: PendingRequest | None) -> Hint | None:
    # Ray copies this module by value, so the class of a request's hint is not this module's `Hint`.
    given = request.kwargs.get("hint") if request else None
    return Hint(*given) if given else None
