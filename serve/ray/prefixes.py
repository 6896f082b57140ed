"""Chooses a replica for a prompt: the one whose cache holds the prompt's beginning, unless it has too much to do.

Nothing here knows Ray; `ray_router` uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
        self._held = dict[object, dict[int, int]]()  # by replica, by block: 0 if sent since the last report, else 1
        self._where = dict[int, set[object]]()  # by block: the replicas that hold it
        self._work = dict[object, dict[str, int]]()  # by replica: tokens left of each request in progress
        self._load = dict[object, int]()  # by replica: the sum of its `_work`

    def keep(self, replicas: Iterable[object]) -> None:
        """Set which replicas exist, and forget all others."""
        now = set(replicas)
        for gone in self._work.keys() - now:
            self.drop(gone)
        for new in now - self._work.keys():
            self._work[new], self._held[new], self._load[new] = {}, {}, 0

    def drop(self, replica: object) -> None:
        """Forget a replica that has died or is about to leave."""
        self._work.pop(replica, None)
        self._load.pop(replica, None)
        for block in self._held.pop(replica, {}):
            self._forget(replica, block)

    def report(self, replica: object, blocks: Iterable[int]) -> None:
        """Record the blocks that a replica reports as cached; blocks sent since its last report are kept once more."""
        if replica not in self._held:
            return
        told, held = set(blocks), self._held[replica]
        for block, age in list(held.items()):
            if block not in told and age:
                del held[block]
                self._forget(replica, block)
            else:
                held[block] = 1
        self._learn(replica, told - held.keys(), 1)

    def sent(self, replica: object, request: str, blocks: Sequence[int], tokens: int, output: int | None) -> None:
        """Record that a request went to a replica, whose cache will hold its prompt.

        Args:
            replica: The replica.
            request: The request's id.
            blocks: The prompt's hashes, see `chain`.
            tokens: Number of prompt tokens.
            output: Output tokens that the request asks for; None: it does not say.
        """
        if replica in self._work:
            rest = max(tokens - BLOCK * self.depth(replica, blocks), 1) + (OUTPUT if output is None else output)
            self._load[replica] += rest - self._work[replica].get(request, 0)
            self._work[replica][request] = rest
            self._learn(replica, blocks, 0)

    def ended(self, replica: object, request: str) -> None:
        """Record that a request has ended, successfully or not."""
        if replica in self._work:
            self._load[replica] -= self._work[replica].pop(request, 0)

    def load(self, replica: object) -> int:
        """Return how many tokens a replica has yet to prefill and to emit."""
        return self._load.get(replica, 0)

    def queue(self, replica: object) -> int:
        """Return the part of a replica's load that belongs to requests waiting for a slot."""
        return self.load(replica) - sum(islice(self._work.get(replica, {}).values(), self._slots))

    def depth(self, replica: object, blocks: Sequence[int]) -> int:
        """Return how many of a prompt's first blocks a replica holds."""
        held = self._held.get(replica, {})
        return next((place for place, block in enumerate(blocks) if block not in held), len(blocks))

    def choose(self, replicas: Sequence[Replica], blocks: Sequence[int]) -> list[Replica]:
        """Return the replicas to try for a prompt, best first; the later ones are for when the earlier take nothing."""
        if self._routing == "random" or len(replicas) < 2:
            return self._random.sample(replicas, len(replicas))
        two = sorted(self._random.sample(replicas, 2), key=self.load)
        if self._routing == "balanced" or not (holders := self._holders(replicas, blocks)):
            return two
        best: Replica | None = min(holders, key=self.load)  # unless it has a queue, no replica is compared with it
        if self.queue(best) > SLACK:
            load, queue = self.load(least := min(replicas, key=self.load)), self.queue(least)
            full = {h for h in holders if self.load(h) > SHARE * load and self.queue(h) - queue > SLACK}
            best = min((each for each in holders if each not in full), key=self.load, default=None)
        return two if best is None else [best, *(each for each in two if each != best)]

    def _holders(self, replicas: Sequence[Replica], blocks: Sequence[int]) -> list[Replica]:
        """Return the replicas that hold most of a prompt's beginning; none if no replica holds its first block."""
        found = set[object]()
        for block in blocks:
            here = self._where.get(block)
            both = here and (found & here if found else here.intersection(replicas))
            if not both:
                break
            found = both
        return [each for each in replicas if each in found] if found else []

    def _learn(self, replica: object, blocks: Iterable[int], age: int) -> None:
        held = self._held[replica]
        for block in blocks:
            held.pop(block, None)
            held[block] = age
            self._where.setdefault(block, set()).add(replica)
        for oldest in [*islice(held, max(len(held) - HELD, 0))]:
            del held[oldest]
            self._forget(replica, oldest)

    def _forget(self, replica: object, block: int) -> None:
        here = self._where.get(block, set())
        here.discard(replica)
        if not here:
            self._where.pop(block, None)
