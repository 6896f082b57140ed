"""Rounds that follow each other on the device: one graph repeats them, and a ring tells the host of each.

The host reads a round's entry while the device runs the next one. When other sequences are to decode, or something else
is to be drafted for them, it raises `stop`: the device ends after the round it is in, and all that it did until then
counts. docs/internals/device-loop.md says what the graph holds, and when rounds run one by one.
"""

from __future__ import annotations

import platform
from collections.abc import Hashable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.backends import nvtx
from specbuild.runtime.backends.gpu.device import Step
from specbuild.runtime.errors import ExecutionError, OptionError
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.tree import TreeSpec

from .ring import Ring
from .room import Room
from .rounds import Draft, Entries, Rounds
from .state import MAX_GRAPHS, ProcessorFlags
from .tree_grower import Extent

AHEAD = 32  # maximum rounds of one launch of a graph
STOP_ROUNDS = 3.0  # rounds that a stop, a round of its own and a launch take about: an H200's
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
    faults: bool = False


class Flights:
    """Lets the device run rounds by itself while nothing needs the host."""

    def __init__(self, rounds: Rounds, room: Room, ahead: int = AHEAD, hosted: bool = False) -> None:
        """Make the ring, and find out whether rounds can be captured.

        Args:
            rounds: The rounds to repeat.
            room: Room in the caches.
            ahead: Entries of the ring, and the maximum rounds of a launch.
            hosted: Whether the host grows the trees; rounds do not follow each other then.

        Raises:
            OptionError: If this host may read an entry before the count that announces it.
        """
        if (machine := platform.machine()) not in _ORDERED:
            raise OptionError(f"a resident loop needs an x86_64 host, this is {machine}: load without `resident`")
        self._rounds, self._room, self.ahead, self._target = rounds, room, ahead, rounds.target
        self._flight: _Flight | None = None
        self.ring = Ring(rounds, ahead)
        self._loops = dict[Hashable, Step | None]()  # None: such a round ran, but is not captured yet
        if hosted:
            rounds.device.uncaptured.append("rounds do not follow each other: the host grows this draft's trees")
        models = [self._target.model, *([rounds.grower.executor.model] if rounds.grower else [])]
        self._captures = not hosted and all(model.capturable for model in models) and self.ring.works

    @property
    def under_way(self) -> bool:
        """Return whether rounds are under way."""
        return self._flight is not None

    @property
    def drafts(self) -> list[Draft]:
        """The drafts of the rounds under way."""
        return self._flight.drafts if self._flight else []

    def of(self, sequences: Seq[Sequence]) -> bool:
        """Return whether the rounds under way are those of exactly these sequences."""
        return {id(s) for s in sequences} == {id(draft.sequence) for draft in self.drafts}

    def go_on(self, plan: Seq[Draft]) -> bool:
        """Return whether the rounds under way draft what `plan` asks, or more for a sequence that drafts no more."""
        specs = {id(draft.sequence): draft.spec for draft in self.drafts}
        if not all(_continues(draft, specs[id(draft.sequence)]) for draft in plan):
            return False
        guesses = {id(draft.sequence): draft.proposal.guess for draft in plan}
        for draft in self.drafts:  # the next entry is judged by what its text says now
            draft.proposal.guess = guesses[id(draft.sequence)]
        return True

    def launch(self, plan: Seq[Draft]) -> None:
        """Start as many rounds as may follow each other, if that is at least two; `plan`: what each sequence drafts."""
        probes = any(draft.proposal.decision and draft.proposal.decision.kind == "probe" for draft in plan)
        if not self._captures or nvtx.enabled or probes or any(draft.sequence.needs_host for draft in plan):
            return
        nodes, grown = self._rounds.bucket(plan), all(draft.spec for draft in plan)
        rounds = self._count(plan, nodes) if grown or all(draft.nodes == 1 for draft in plan) else 0
        if rounds < 2:
            return
        stream, asked = self._target.stream, ProcessorFlags.of([draft.sequence.params for draft in plan])
        extent, grower = None, self._rounds.grower
        if grower and grown:
            extent = Extent.of([draft.spec for draft in plan if draft.spec], grower.executor, nodes)
        if self._first_of((nodes, extent, asked)):
            return
        if grower and extent:
            grower.catch_up([draft.sequence for draft in plan])
            self._rounds.slots.update([(draft.sequence, draft.spec) for draft in plan], stream)
        else:
            self._rounds.draft(plan, nodes, asked)
        step = self.capture(nodes, extent, asked)
        if step is None:
            self._captures = False
            self._target.wait()  # the ordinary round that follows may begin on the draft's stream
            return
        first = self.ring.begin([draft.sequence for draft in plan], rounds)
        step()
        self._flight = _Flight(list(plan), nodes, self.ring.entries(nodes), first)

    def _count(self, plan: Seq[Draft], nodes: int) -> int:
        """Return how many rounds may follow each other.

        At most the entries of the ring and the rounds that the caches surely have rows for; none after one sequence
        must have ended.
        """
        rounds, shapes = self.ahead, [draft.spec for draft in plan if draft.spec]
        for draft in plan:
            s, emitted = draft.sequence, 1
            left = self._room.max_positions - len(s.tokens)
            rooms = [self._target.rows(s.slot) - nodes - s.cached]
            if draft.spec:
                rooms += [self._room.left(s, draft.spec, shapes), left - draft.spec.nodes]
                emitted += draft.spec.depth
            rounds = min(rounds, s.request.max_tokens - len(s.tokens), min(rooms) // emitted + 1)
        return rounds

    def _first_of(self, key: Hashable) -> bool:
        """Return whether this is the first such round: it may load or allocate, so it must not be captured."""
        if key in self._loops:
            return False
        if len(self._loops) >= MAX_GRAPHS:
            self._loops.clear()
        self._loops[key] = None
        return True

    def capture(self, nodes: int, extent: Extent | None, asked: ProcessorFlags) -> Step | None:
        """Return a graph of rounds with trees of `extent`, or of the root alone; None without such graphs."""
        key = nodes, extent, asked
        step = self._loops.get(key) or self._rounds.device.loop(
            lambda handle: self._body(handle, nodes, extent, asked), self._target.stream
        )
        self._loops[key] = step
        return step

    def _body(self, handle: int, nodes: int, extent: Extent | None, asked: ProcessorFlags) -> None:
        """Enqueue a round: its trees, the target's step and commit, and the ring's entry."""
        stream, block, grower = self._target.stream, self._rounds.blocks[nodes], self._rounds.grower
        if grower and extent:
            self._rounds.device.after(grower.executor.stream, stream)
            grower.grow(extent, asked, block)
            self._rounds.device.after(stream, grower.executor.stream)
        else:
            self._rounds.device.copy_rows(block.at["tokens"], self._rounds.slots.at["roots"], stream)
        self._rounds.advance(nodes, asked)
        self.ring.publish(nodes, handle)

    def next_entry(self) -> Entries:
        """Wait for the next round under way and return its entry; raises ExecutionError."""
        flight, self._flight = self._flight, None  # stays None if the device fails
        assert flight
        if not self._rounds.device.reached(self.ring.published, flight.read + 1, self._target.stream):
            raise ExecutionError(f"the loop on the device ended before round {flight.read + 1}: report it")
        self._flight = flight
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
            for draft in flight.drafts:
                draft.proposal.guess = None  # nobody looked at the text
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


def _continues(draft: Draft, under_way: TreeSpec | None) -> bool:
    """Return whether a sequence's rounds under way, with trees of a shape or none, do for what it is to draft now."""
    decision, shape = draft.proposal.decision, draft.sequence.shape
    if draft.tree and len(draft.tree) > 1:  # a tree from the host, for which the device has to stop
        return decision is not None and under_way is None and decision.speedup < STOP_ROUNDS
    if draft.spec and under_way and decision and decision.kind == "model" and shape:
        return under_way.nodes <= shape.nodes and under_way.depth <= shape.depth
    over = not draft.sequence.drafts or (draft.drafts and decision is None)  # near its end, or out of room
    return draft.spec == under_way or (over and draft.nodes == 1)
