"""Where a prompt goes: to the replica whose cache holds its beginning, unless that one has too much to do.

Nothing here knows Ray: `ray_router` asks it, and so does the simulation of a fleet (`benchmarks/fleet.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import islice
from random import Random
from typing import Literal, TypeVar

Routing = Literal["prefix", "balanced", "random"]
Replica = TypeVar("Replica", bound=object)

BLOCK = 16  # tokens that have one hash
SHARE, SLACK = 1.5, 64  # passed over: above so many times the lightest's load, and so many more tokens that wait
OUTPUT = 128  # tokens that a request is taken to emit where it does not say
HELD = 1 << 16  # blocks that are remembered of one replica, at most


def chain(tokens: Sequence[int], scope: str) -> list[int]:
    """A hash of 64 bits for each whole block of a prompt, which depends on all blocks before it.

    `scope`: the model and the salt, outside of which no text is shared.
    """
    before, hashes = blake2b(scope.encode(), digest_size=8).digest(), list[int]()
    for begin in range(0, len(tokens) - BLOCK + 1, BLOCK):
        block = b",".join(b"%d" % token for token in tokens[begin : begin + BLOCK])
        before = blake2b(before + block, digest_size=8).digest()
        hashes.append(int.from_bytes(before, "little"))
    return hashes


class Places:
    """What each replica's cache holds, as far as is known, and how many tokens it has before it."""

    def __init__(self, random: Random, routing: Routing = "prefix", slots: int = 0) -> None:
        """`slots`: requests that a replica decodes at once; those behind them wait."""
        self._random, self._routing, self._slots = random, routing, slots
        self._held = dict[object, dict[int, int]]()  # by replica: how many reports ago a block was known to be there
        self._where = dict[int, set[object]]()  # by block
        self._work = dict[object, dict[str, int]]()  # by replica: tokens of each request under way
        self._load = dict[object, int]()  # their sums

    def keep(self, replicas: Iterable[object]) -> None:
        """These are all replicas there are; what is known of any other one is forgotten."""
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
        """A replica says what its cache holds; what was sent there since its last report is still believed once."""
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
        """A request went to a replica, whose cache will hold its prompt of so many tokens."""
        if replica in self._work:
            rest = max(tokens - BLOCK * self.depth(replica, blocks), 1) + (OUTPUT if output is None else output)
            self._load[replica] += rest - self._work[replica].get(request, 0)
            self._work[replica][request] = rest
            self._learn(replica, blocks, 0)

    def ended(self, replica: object, request: str) -> None:
        """A request has ended, however it did."""
        if replica in self._work:
            self._load[replica] -= self._work[replica].pop(request, 0)

    def load(self, replica: object) -> int:
        """Tokens that a replica has yet to read and to emit."""
        return self._load.get(replica, 0)

    def queue(self, replica: object) -> int:
        """Of its load the tokens of requests that wait for a slot."""
        return self.load(replica) - sum(islice(self._work.get(replica, {}).values(), self._slots))

    def depth(self, replica: object, blocks: Sequence[int]) -> int:
        """How many of a prompt's first blocks a replica holds."""
        held = self._held.get(replica, {})
        return next((place for place, block in enumerate(blocks) if block not in held), len(blocks))

    def choose(self, replicas: Sequence[Replica], blocks: Sequence[int]) -> list[Replica]:
        """Of these replicas the one for a prompt, and behind it those to try where it takes nothing."""
        if self._routing == "random" or len(replicas) < 2:
            return self._random.sample(replicas, len(replicas))
        two = sorted(self._random.sample(replicas, 2), key=self.load)
        if self._routing == "balanced" or not (holders := self._holders(replicas, blocks)):
            return two
        best = min(holders, key=self.load)
        least = min(replicas, key=self.load)
        if self.load(best) > SHARE * self.load(least) and self.queue(best) - self.queue(least) > SLACK:
            return two
        return [best, *(each for each in two if each != best)]

    def _holders(self, replicas: Sequence[Replica], blocks: Sequence[int]) -> list[Replica]:
        """Those that hold most of a prompt's beginning; none where nobody holds its first block."""
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
        while len(held) > HELD:
            oldest = next(iter(held))
            del held[oldest]
            self._forget(replica, oldest)

    def _forget(self, replica: object, block: int) -> None:
        here = self._where.get(block, set())
        here.discard(replica)
        if not here:
            self._where.pop(block, None)
