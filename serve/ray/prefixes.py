"""Chooses a replica for a prompt: the one whose cache holds the prompt's beginning, unless it has too much to do.

Nothing here knows Ray; `ray_router` uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from random import Random
from typing import Literal, TypeVar

Routing = Literal["prefix", "balanced", "random"]
Replica = TypeVar("Replica", bound=object)

BLOCK = 16  # tokens per hash
SHARE, SLACK = 1.5, 64  # a holder above SHARE × the least load, with SLACK more waiting tokens, is passed over
OUTPUT = 128  # output tokens assumed for a request that does not say
HELD = 1 << 16  # maximum number of blocks remembered per replica


def chain(tokens: Sequence[int], scope: str, known: Sequence[int] = ()) -> list[int]:
    """Return a 64-bit hash of each whole block of a prompt; each hash depends on all blocks before it.

    scope: the model and the cache salt, outside of which no cached text is shared. known: the first blocks' hashes.
    """
    before, hashes = blake2b(scope.encode(), digest_size=8).digest(), list(known)
    if known:
        before = known[-1].to_bytes(8, "little")
    for begin in range(BLOCK * len(known), len(tokens) - BLOCK + 1, BLOCK):
        block = b",".join(b"%d" % token for token in tokens[begin : begin + BLOCK])
        before = blake2b(before + block, digest_size=8).digest()
        hashes.append(int.from_bytes(before, "little"))
    return hashes


@dataclass(slots=True)
class _Replica:
    """A replica, as far as it is known."""

    blocks: dict[int, int] = field(default_factory=dict)  # that it holds: 0 if sent since its last report, else 1
    work: dict[str, int] = field(default_factory=dict)  # tokens left of each request in progress


class Places:
    """The contents of each replica's cache, as far as they are known, and the tokens that it has yet to process."""

    def __init__(self, random: Random, routing: Routing = "prefix", slots: int = 0) -> None:
        """Begin without any replicas.

        Args:
            random: Source of the random choices.
            routing: How `choose` chooses: by prefix, as the lighter of two random replicas, or at random.
            slots: Requests that a replica decodes at once; further ones wait.
        """
        self._random, self._routing, self._slots = random, routing, slots
        self._known = dict[object, _Replica]()

    def keep(self, replicas: Iterable[object]) -> None:
        """Set which replicas exist, and forget all others."""
        self._known = {each: self._known.get(each) or _Replica() for each in replicas}

    def drop(self, replica: object) -> None:
        """Forget a replica that has died or is about to leave."""
        self._known.pop(replica, None)

    def report(self, replica: object, blocks: Iterable[int]) -> None:
        """Record the blocks that a replica reports as cached; blocks sent since its last report are kept once more."""
        if known := self._known.get(replica):
            reported = set(blocks)
            known.blocks = {block: 1 for block, age in known.blocks.items() if block in reported or age == 0}
            _learn(known, reported - known.blocks.keys(), 1)

    def sent(self, replica: object, request: str, blocks: Sequence[int], tokens: int, output: int | None) -> None:
        """Record that a request went to a replica, whose cache will hold its prompt.

        Args:
            replica: The replica.
            request: The request's id.
            blocks: The prompt's hashes, see `chain`.
            tokens: Number of prompt tokens.
            output: Output tokens that the request asks for; None: it does not say.
        """
        if known := self._known.get(replica):
            unread = max(tokens - BLOCK * self.depth(replica, blocks), 1)
            known.work[request] = unread + (OUTPUT if output is None else output)
            _learn(known, blocks, 0)

    def ended(self, replica: object, request: str) -> None:
        """Record that a request has ended, successfully or not."""
        if known := self._known.get(replica):
            known.work.pop(request, None)

    def load(self, replica: object) -> int:
        """Return how many tokens a replica has yet to prefill and to emit."""
        known = self._known.get(replica)
        return sum(known.work.values()) if known else 0

    def queue(self, replica: object) -> int:
        """Return the part of a replica's load that belongs to requests waiting for a slot."""
        known = self._known.get(replica)
        return sum(islice(known.work.values(), self._slots, None)) if known else 0

    def depth(self, replica: object, blocks: Sequence[int]) -> int:
        """Return how many of a prompt's first blocks a replica holds."""
        known = self._known.get(replica, _Replica())
        return next((place for place, block in enumerate(blocks) if block not in known.blocks), len(blocks))

    def choose(self, replicas: Sequence[Replica], blocks: Sequence[int]) -> list[Replica]:
        """Return the replicas to try for a prompt, best first; the later ones are for when the earlier take nothing."""
        if self._routing == "random" or len(replicas) < 2:
            return self._random.sample(replicas, len(replicas))
        two = sorted(self._random.sample(replicas, 2), key=self.load)
        depths = {each: self.depth(each, blocks) for each in replicas}
        deepest = max(depths.values())
        if self._routing == "balanced" or not deepest:
            return two
        least = min(replicas, key=self.load)
        holders = [each for each in replicas if depths[each] == deepest and not self._is_full(each, least)]
        best = min(holders, key=self.load, default=None)
        return two if best is None else [best, *(each for each in two if each != best)]

    def _is_full(self, replica: object, least: object) -> bool:
        """Return whether a replica has too much to do beside the one with the least load."""
        waits = self.queue(replica) - self.queue(least) > SLACK
        return waits and self.load(replica) > SHARE * self.load(least)


def _learn(known: _Replica, blocks: Iterable[int], age: int) -> None:
    """Note that a replica holds these blocks, and forget the oldest beyond the limit."""
    for block in blocks:
        known.blocks.pop(block, None)
        known.blocks[block] = age
    for oldest in [*islice(known.blocks, max(len(known.blocks) - HELD, 0))]:
        del known.blocks[oldest]
