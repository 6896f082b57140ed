"""Rounds that follow each other on the device: one graph repeats them, and a ring reports each to the host.

The host reads a round's entry while the device runs the next one. When other sequences are to decode, or something else
is to be drafted for them, it raises `stop`: the device ends after the round it is in, and all that it did until then
counts. docs/internals/device-loop.md says what the graph holds, and when rounds run one by one.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace

from specbuild.runtime.backends.gpu.device import Step
from specbuild.runtime.decoding.round_result import RoundResult
from specbuild.runtime.errors import ExecutionError, OptionError
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.proposal import Proposal
from specbuild.runtime.speculation.tree import TreeSpec

from .graphs import Graphs
from .ring import Ring
from .room import Room
from .rounds import Rounds
from .slots import Plan, ProcessorFlags
from .tree_grower import Extent

AHEAD = 32  # maximum rounds of one launch of a graph
STOP_ROUNDS = 3.0  # rounds that a stop, a round of its own and a launch take about: an H200's
_ORDERED = ("x86_64", "AMD64")  # machines that read memory in the order in which a device writes it


def follows(drafter: object = None) -> bool:
    """Return whether rounds may follow each other on this host, with the drafter whose trees the host grows, if any."""
    return drafter is None and platform.machine() in _ORDERED


class ResidentRun:
    """Lets the device run rounds by itself while nothing needs the host."""

    def __init__(self, rounds: Rounds, room: Room, ahead: int = AHEAD, on_host: bool = False) -> None:
        """Make the ring, and find out whether rounds can be captured.

        Args:
            rounds: The rounds to repeat.
            room: Room in the caches.
            ahead: Entries of the ring, and the maximum rounds of a launch.
            on_host: Whether the host grows the trees; rounds do not follow each other then.

        Raises:
            OptionError: If this host may read an entry before the count that announces it.
        """
        if not follows():
            raise OptionError(f"a resident loop needs an x86_64 host, this is {platform.machine()}: drop `resident`")
        self._rounds, self._room, self._target = rounds, room, rounds.target
        self.ring, self.graphs = Ring(rounds, ahead), Graphs(rounds.target)
        if on_host:
            rounds.device.uncaptured.append("rounds do not follow each other: the host grows this draft's trees")
        self._captures = not on_host and all(e.model.capturable for e in rounds.executors) and self.ring.works
        self._plan: Plan = ()  # of the rounds that the device runs; empty: it runs none
        self._nodes, self._next, self._faulty = 0, 0, False  # nodes of their step, their next entry

    @property
    def running(self) -> bool:
        """Return whether the device runs rounds by itself."""
        return bool(self._plan)

    def serves(self, sequences: Seq[Sequence]) -> bool:
        """Return whether the rounds are those of exactly these sequences, and were not stopped."""
        return not self.ring.stopped and {id(s) for s in sequences} == {id(s) for s, _ in self._plan}

    def goes_on(self, plan: Plan) -> bool:
        """Return whether the rounds draft what a plan for their sequences asks, or more for one that drafts no more."""
        running = {id(sequence): proposal for sequence, proposal in self._plan}
        if not all(_continues(sequence, proposal, running[id(sequence)].shape) for sequence, proposal in plan):
            return False
        # The next entry is judged by what its text says now.
        self._plan = [(s, replace(running[id(s)], continuation=proposal.continuation)) for s, proposal in plan]
        return True

    def launch(self, plan: Plan) -> None:
        """Start as many rounds as may follow each other, if that is at least two."""
        probes = any(proposal.decision and proposal.decision.kind == "probe" for _, proposal in plan)
        if not self._captures or probes or any(sequence.needs_host for sequence, _ in plan):
            return
        shapes = [proposal.shape for _, proposal in plan if proposal.shape]
        if len(shapes) < len(plan) and any(proposal.nodes > 1 for _, proposal in plan):
            return
        nodes, flags = self._rounds.bucket(plan), ProcessorFlags.of([sequence.params for sequence, _ in plan])
        if (rounds := self._count(plan, nodes, shapes)) < 2:
            return
        grower = self._rounds.grower
        extent = Extent.of(shapes, grower.executor, nodes) if grower and shapes else None
        step = self.graphs.find((nodes, extent, flags), lambda: self.capture(nodes, extent, flags))
        if step is None:
            return
        if grower and extent:
            grower.catch_up([sequence for sequence, _ in plan])
            self._rounds.slots.update(plan, self._target.stream)
        else:
            self._rounds.draft(plan, nodes, flags)
        self._next = self.ring.begin([sequence for sequence, _ in plan], rounds)
        step()
        self._plan, self._nodes, self._faulty = plan, nodes, False

    def _count(self, plan: Plan, nodes: int, shapes: Seq[TreeSpec]) -> int:
        """Return how many rounds may follow each other.

        At most the entries of the ring and the rounds that the caches surely have rows for; none after one sequence
        must have ended.
        """
        rounds = self.ring.ahead
        for s, proposal in plan:
            rows, emitted = [self._target.rows(s.slot) - nodes - s.cached], 1
            if shape := proposal.shape:
                rows += [self._room.free_rows(s, shape, shapes), self._room.positions(s) - shape.nodes]
                emitted += shape.depth
            rounds = min(rounds, s.request.max_tokens - len(s.tokens), min(rows) // emitted + 1)
        return rounds

    def capture(self, nodes: int, extent: Extent | None, flags: ProcessorFlags) -> Step | None:
        """Return a graph of rounds with trees of `extent`, or of the root alone; None if there are no such graphs."""
        step = self._rounds.device.loop(lambda handle: self._body(handle, nodes, extent, flags), self._target.stream)
        self._captures = step is not None
        return step

    def _body(self, handle: int, nodes: int, extent: Extent | None, flags: ProcessorFlags) -> None:
        """Enqueue a round: its trees, the target's step and commit, and the ring's entry."""
        stream, block, grower = self._target.stream, self._rounds.blocks[nodes], self._rounds.grower
        if grower and extent:
            self._rounds.device.after(grower.executor.stream, stream)
            grower.grow(extent, flags, block)
            self._rounds.device.after(stream, grower.executor.stream)
        else:
            self._rounds.device.copy_rows(block.at["tokens"], self._rounds.slots.at["roots"], stream)
        self._rounds.advance(nodes, flags)
        self.ring.publish(nodes, handle)

    def next_results(self) -> list[RoundResult]:
        """Wait for the next round and return what it made of each sequence; raises ExecutionError."""
        plan, self._plan = self._plan, ()  # stays empty if the device fails
        if not self._rounds.device.reached(self.ring.published, self._next + 1, self._target.stream):
            raise ExecutionError(f"the loop on the device ended before round {self._next + 1}: report it")
        self._plan = plan
        return self._read(plan)

    @property
    def read_out(self) -> bool:
        """Return whether every entry that the rounds may write has been read."""
        return self._next == self.ring.ahead

    def _read(self, plan: Plan) -> list[RoundResult]:
        entry, results = self.ring.entries(self._nodes)[self._next], list[RoundResult]()
        self._next += 1
        for sequence, proposal in plan:
            length, fault, nodes, *emitted = entry[sequence.slot].tolist()
            results.append(RoundResult(sequence, proposal, nodes - 1, range(length), emitted[:length], fault))
        self._faulty |= any(result.fault for result in results)
        return results

    def drain(self) -> Iterator[list[RoundResult]]:
        """Stop the device after the round it is in, and yield what was not read yet; exhaust the iterator."""
        plan, self._plan = self._plan, ()
        self.ring.stop()
        self._target.wait()
        unread = [(sequence, replace(each, continuation=None)) for sequence, each in plan]  # nobody saw the texts
        while self._next < self.ring.published[0]:
            yield self._read(unread)
        if self._faulty:
            self._rounds.clear_faults(self._nodes)

    def leave(self, slot: int) -> bool:
        """Stop the rounds of a slot's sequence, which emits no more; return whether all others have ended too."""
        others = [each for each in self._plan if each[0].slot != slot]
        if len(others) == len(self._plan):  # it ended with earlier rounds
            return False
        self.ring.stop()
        self._plan = others
        return all(sequence.finish_reason for sequence, _ in others)

    def close(self) -> None:
        """Stop the rounds, whose entries are never read, and drop the graphs."""
        self.ring.stop()
        self._plan = ()
        self.graphs.clear()


def _continues(sequence: Sequence, proposal: Proposal, running: TreeSpec | None) -> bool:
    """Return whether rounds with trees of a shape, or none, do for what a sequence is to draft now."""
    decision, shape = proposal.decision, sequence.shape
    if len(proposal.tree) > 1:  # a tree from the host, for which the device has to stop
        return decision is not None and running is None and decision.speedup < STOP_ROUNDS
    if proposal.shape and running and decision and decision.kind == "model" and shape:
        return running.nodes <= shape.nodes and running.depth <= shape.depth
    ends = not sequence.drafts or (shape is not None and decision is None)  # near its end, or out of room
    return proposal.shape == running or (ends and proposal.nodes == 1)
