"""Rounds that follow each other on the device: one graph repeats them, and a ring tells the host of each.

The host reads a round's entry while the device runs the next one. When other sequences are to decode, or something else
is to be drafted for them, it raises `stop`: the device ends after the round it is in, and all that it did until then
counts. docs/internals/device-loop.md says what the graph holds, and when rounds run one by one.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Hashable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.backends import nvtx
from specbuild.runtime.backends.gpu.device import Step
from specbuild.runtime.drafting.habits import Common
from specbuild.runtime.errors import ExecutionError, OptionError
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.tree import Tree

from .ring import Ring
from .room import Room
from .rounds import Draft, Entries, Rounds
from .state import MAX_GRAPHS, ProcessorFlags
from .texts import Texts
from .tree_grower import Extent

AHEAD = 32  # maximum rounds of one launch of a graph
_ORDERED = ("x86_64", "AMD64")  # machines that read memory in the order in which a device writes it


def follows(hosted: object = None) -> bool:
    """Return whether rounds may follow each other on this host, with the drafter whose trees the host grows, if any."""
    return hosted is None and platform.machine() in _ORDERED


@dataclass(slots=True)
class _Flight:
    """Rounds under way: what each of them drafts, and where the host reads their results."""

    drafts: list[Draft]
    nodes: int
    entries: NDArray[np.int32]  # [ahead, B, nodes + 3]: length, fault, counts, emitted
    read: int  # index of the next entry
    bound: int  # tokens of a text's continuation that the device drafts at most; 0: it drafts none
    faults: bool = False
    at: float | None = None  # when the last entry was read


class Flights:
    """Lets the device run rounds by itself while nothing needs the host."""

    def __init__(
        self, rounds: Rounds, room: Room, ahead: int = AHEAD, hosted: bool = False, common: Common | None = None
    ) -> None:
        """Make the ring, and find out whether rounds can be captured.

        Args:
            rounds: The rounds to repeat.
            room: Room in the caches.
            ahead: Entries of the ring, and the maximum rounds of a launch.
            hosted: Whether the host grows the trees; rounds do not follow each other then.
            common: What common texts say.

        Raises:
            OptionError: If this host may read an entry before the count that announces it.
        """
        if (machine := platform.machine()) not in _ORDERED:
            raise OptionError(f"a resident loop needs an x86_64 host, this is {machine}: load without `resident`")
        self._rounds, self._room, self.ahead, self._target = rounds, room, ahead, rounds.target
        self._flight: _Flight | None = None
        self.limit = 0  # what the operator's limits allowed when the rounds under way were launched
        self.seconds: float | None = None  # between the last two entries of rounds under way; None: there was one
        self.behind = False  # whether the device had finished the last round read before the host asked for it
        self.ring = Ring(rounds, ahead)
        self._loops = dict[Hashable, Step | None]()  # None: such a round ran, but is not captured yet
        if hosted:
            rounds.device.uncaptured.append("rounds do not follow each other: the host grows this draft's trees")
        models = [self._target.model, *([rounds.grower.executor.model] if rounds.grower else [])]
        self._captures = not hosted and all(model.capturable for model in models) and self.ring.works
        spare = self._target.exactness is not None and self._target.bucket(1) > 1
        texts = Texts(rounds, common) if self._captures and spare else None
        self.texts = texts if texts and texts.works else None  # only where drafting costs no rows

    @property
    def under_way(self) -> bool:
        """Return whether rounds are under way."""
        return self._flight is not None

    @property
    def drafts(self) -> list[Draft]:
        """The drafts of the rounds under way."""
        return self._flight.drafts if self._flight else []

    @property
    def bound(self) -> int | None:
        """Tokens of a text that the device drafts at most in the rounds under way; None: the host continues texts."""
        continues = any(draft.continued for draft in self.drafts)
        return self._flight.bound if self._flight and continues else None

    def of(self, sequences: Seq[Sequence]) -> bool:
        """Return whether the rounds under way are those of exactly these sequences."""
        return {id(s) for s in sequences} == {id(draft.sequence) for draft in self.drafts}

    def eased(self, plan: Seq[Draft], longest: int) -> list[Draft]:
        """Return a plan in which the device continues texts itself, where it can; `longest`: as far as limits allow.

        A tree is grown for all sequences or for none: where only some are to have one, their texts are continued too.
        A probe is kept: such a round is not followed by others.
        """
        probes = any(draft.option and draft.option.kind == "probe" for draft in plan)
        if not (self.texts and longest) or probes or all(draft.spec for draft in plan):
            return list(plan)
        eases = [d.sequence.policy is not None and d.sequence.sampler.matcher is None for d in plan]
        lone = [Tree([draft.sequence.tokens[-1]]) for draft in plan]
        return [
            replace(draft, tree=root, spec=None, continued=True) if each else draft
            for draft, root, each in zip(plan, lone, eases, strict=True)
        ]

    def go_on(self, plan: Seq[Draft]) -> bool:
        """Return whether the rounds under way draft what `plan` asks, or more for a sequence that drafts no more."""
        specs = {id(draft.sequence): draft.spec for draft in self.drafts}
        for draft in plan:
            if draft.tree and len(draft.tree) > 1:  # a tree from the host
                return False
            over = not draft.sequence.drafts or (draft.drafts and draft.option is None)  # near its end, or out of room
            if draft.spec != specs[id(draft.sequence)] and not (over and draft.nodes == 1):
                return False
        return True

    def launch(self, plan: Seq[Draft], bound: int = 0, most: int | None = None) -> None:
        """Start as many rounds as may follow each other, if that is at least two.

        Args:
            plan: What each sequence drafts.
            bound: Tokens of a text's continuation that the device drafts at most.
            most: Maximum rounds; None: as many as the ring has entries.
        """
        if not self._captures or nvtx.enabled or any(draft.sequence.needs_host for draft in plan):
            return
        nodes, grown = self._rounds.bucket(plan), all(draft.spec for draft in plan)
        bound, most = (bound, most) if any(draft.continued for draft in plan) else (0, None)
        rounds = self._count(plan, nodes, bound) if grown or all(draft.nodes == 1 for draft in plan) else 0
        rounds = min(rounds, most or rounds)
        if rounds < 2:
            return
        stream, asked = self._target.stream, ProcessorFlags.of([draft.sequence.params for draft in plan])
        extent, grower = None, self._rounds.grower
        if grower and grown:
            extent = Extent.of([draft.spec for draft in plan if draft.spec], grower.executor, nodes)
        if self._first_of((nodes, extent, asked, bound > 0)):
            return
        if grower and extent:
            grower.catch_up([draft.sequence for draft in plan])
            self._rounds.slots.update([(draft.sequence, draft.spec) for draft in plan], stream)
        else:
            self._rounds.draft(plan, nodes, asked)
        if self.texts and bound:
            self.texts.update([(d.sequence, bound * d.continued) for d in plan], nodes)
        step = self.capture(nodes, extent, asked, bound > 0)
        if step is None:
            self._captures = False
            self._target.wait()  # the ordinary round that follows may begin on the draft's stream
            return
        first = self.ring.begin([draft.sequence for draft in plan], rounds)
        step()
        self._flight = _Flight(list(plan), nodes, self.ring.entries(nodes), first, bound)

    def _count(self, plan: Seq[Draft], nodes: int, bound: int) -> int:
        """Return how many rounds may follow each other.

        At most the entries of the ring and the rounds that the caches surely have rows for; none after one sequence
        must have ended.
        """
        rounds, shapes = self.ahead, [draft.spec for draft in plan if draft.spec]
        for draft in plan:
            s, emitted = draft.sequence, 1
            left = self._room.max_positions - len(s.tokens)
            rooms = [self._target.rows(s.slot) - nodes - s.cached]
            if draft.continued:
                longest = min(bound, nodes - 1)
                rooms.append(left - longest)
                emitted += longest
            if draft.spec:
                rooms += [self._room.left(s, draft.spec, shapes), left - draft.spec.nodes]
                emitted += draft.spec.depth
            rounds = min(rounds, s.limit - len(s.tokens), min(rooms) // emitted + 1)
        return rounds

    def _first_of(self, key: Hashable) -> bool:
        """Return whether this is the first such round: it may load or allocate, so it must not be captured."""
        if key in self._loops:
            return False
        if len(self._loops) >= MAX_GRAPHS:
            self._loops.clear()
        self._loops[key] = None
        return True

    def capture(self, nodes: int, extent: Extent | None, asked: ProcessorFlags, texts: bool = False) -> Step | None:
        """Return a graph of rounds with trees of `extent`, of texts, or of the root alone; None without such graphs."""
        key = nodes, extent, asked, texts
        step = self._loops.get(key) or self._rounds.device.loop(
            lambda handle: self._body(handle, nodes, extent, asked, texts), self._target.stream
        )
        self._loops[key] = step
        return step

    def _body(self, handle: int, nodes: int, extent: Extent | None, asked: ProcessorFlags, texts: bool) -> None:
        """Enqueue a round: its trees, the target's step and commit, and the ring's entry."""
        stream, block, grower = self._target.stream, self._rounds.blocks[nodes], self._rounds.grower
        if grower and extent:
            self._rounds.device.after(grower.executor.stream, stream)
            grower.grow(extent, asked, block)
            self._rounds.device.after(stream, grower.executor.stream)
        elif texts and self.texts:
            self.texts.draft(nodes)
        else:
            self._rounds.device.copy_rows(block.at["tokens"], self._rounds.slots.at["roots"], stream)
        self._rounds.advance(nodes, asked)
        self.ring.publish(nodes, handle)

    def next_entry(self) -> Entries:
        """Wait for the next round under way and return its entry; raises ExecutionError."""
        flight, self._flight = self._flight, None  # stays None if the device fails
        assert flight
        self.behind, before = int(self.ring.published[0]) > flight.read, flight.at
        if not self._rounds.device.reached(self.ring.published, flight.read + 1, self._target.stream):
            raise ExecutionError(f"the loop on the device ended before round {flight.read + 1}: report it")
        self._flight, flight.at = flight, time.perf_counter()
        self.seconds = flight.at - before if before is not None else None
        return self._read(flight)

    @property
    def read_out(self) -> bool:
        """Return whether every entry that the rounds under way may write has been read."""
        return self._flight is not None and self._flight.read == self.ahead

    @staticmethod
    def _read(flight: _Flight) -> Entries:
        entry = flight.entries[flight.read]
        flight.read += 1
        flight.faults |= bool(entry[:, 1].any())
        told = [(draft, entry[draft.sequence.slot].tolist()) for draft in flight.drafts]
        return [(draft, fault, nodes, emitted[:length]) for draft, (length, fault, nodes, *emitted) in told]

    def land(self) -> Iterator[Entries]:
        """Stop the device after the round it is in, and yield the entries not read yet; exhaust the iterator."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        self.ring.stop()
        self._target.wait()
        while flight.read < self.ring.published[0]:
            yield self._read(flight)
        if flight.faults:
            self._rounds.forget_faults(flight.nodes)

    def leave(self, slot: int) -> bool:
        """Stop the rounds of a slot's ended sequence; return whether all other sequences in them have ended too."""
        drafts = self.drafts
        if all(draft.sequence.slot != slot for draft in drafts):  # it ended with earlier rounds
            return False
        self.ring.stop()
        return all(d.sequence.slot == slot or d.sequence.finish_reason for d in drafts)

    def abandon(self) -> None:
        """Stop the rounds under way; their entries are never read."""
        self.ring.stop()
        self._flight = None
        self._loops.clear()
