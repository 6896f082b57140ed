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
from specbuild.runtime.errors import ExecutionError, OptionError, SpecbuildError, one_line
from specbuild.runtime.requests.sequence import Sequence

from .room import Room
from .rounds import Draft, Rounds
from .state import MAX_GRAPHS, ProcessorFlags, launch
from .tree_grower import Extent

AHEAD = 32  # maximum rounds of one launch of a graph
_ORDERED = ("x86_64", "AMD64")  # machines that read memory in the order in which a device writes it
Entries = list[tuple[Draft, int, list[int]]]  # a round's drafts, each with its fault and emitted tokens


@dataclass(slots=True)
class _Flight:
    """Rounds under way: what each of them drafts, and where the host reads their results."""

    drafts: list[Draft]
    nodes: int
    entries: NDArray[np.int32]  # [ahead, B, nodes + 2]: length, fault, emitted
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
        device, entry = rounds.device, self._target.batch_size * (self._target.buckets[-1] + 2)
        self._flight: _Flight | None = None
        self._ring = device.pinned((ahead * entry,), np.int32)
        self._published, self._stop = device.pinned((1,), np.uint64), device.pinned((1,), np.uint32)
        self._round, self._first = device.empty((1,), np.uint64), device.pinned((1,), np.uint64)
        self._loops = dict[Hashable, Step | None]()  # None: such a round ran, but is not captured yet
        if hosted:
            device.uncaptured.append("rounds do not follow each other: the host grows this draft's trees")
        models = [self._target.model, *([rounds.grower.executor.model] if rounds.grower else [])]
        self._captures = not hosted and all(model.capturable for model in models) and self._publishes()

    def _publishes(self) -> bool:
        """Return whether `publish` can be launched; this runs it once, as it must have before a capture."""
        try:
            self._publish(self._target.buckets[0], 0)
            self._target.wait()
        except SpecbuildError as error:
            self._rounds.device.uncaptured.append(one_line(error))
            return False
        return True

    @property
    def under_way(self) -> bool:
        """Return whether rounds are under way."""
        return self._flight is not None

    def of(self, sequences: Seq[Sequence]) -> bool:
        """Return whether the rounds under way are those of exactly these sequences."""
        drafts = self._flight.drafts if self._flight else []
        return {id(s) for s in sequences} == {id(draft.sequence) for draft in drafts}

    def go_on(self, plan: Seq[Draft]) -> bool:
        """Return whether the rounds under way draft what `plan` asks, or more for a sequence that drafts no more."""
        specs = {id(draft.sequence): draft.spec for draft in self._flight.drafts} if self._flight else {}
        for draft in plan:
            if draft.tree and len(draft.tree) > 1:  # a tree from the host
                return False
            over = not draft.sequence.drafts or (draft.drafts and draft.option is None)  # near its end, or out of room
            if draft.spec != specs[id(draft.sequence)] and not (over and draft.nodes == 1):
                return False
        return True

    def launch(self, plan: Seq[Draft]) -> None:
        """Start as many rounds as may follow each other, if that is at least two."""
        if not self._captures or nvtx.enabled:
            return
        if any(
            d.sequence.params.logprobs is not None or d.sequence.sampler.matcher is not None for d in plan
        ):  # every round needs the host
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
        first = self.ahead - rounds  # so the loop ends with the ring's last entry
        self._first[:] = self._published[:] = first
        self._stop[:] = 0
        self._rounds.device.upload(self._round, self._first, stream)
        step()
        self._flight = _Flight(list(plan), nodes, self._entries(nodes), first)

    def _count(self, plan: Seq[Draft], nodes: int) -> int:
        """Return how many rounds may follow each other.

        At most the entries of the ring and the rounds that the caches surely have rows for; none after one sequence
        must have ended.
        """
        rounds, shapes = self.ahead, [draft.spec for draft in plan if draft.spec]
        for draft in plan:
            s, emitted = draft.sequence, 1
            rooms = [self._target.rows(s.slot) - nodes - s.cached]
            if draft.spec:
                rooms += [
                    self._room.left(s, draft.spec, shapes),
                    self._room.max_positions - draft.spec.nodes - len(s.tokens),
                ]
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

    def capture(self, nodes: int, extent: Extent | None, asked: ProcessorFlags) -> Step | None:
        """Return a graph of rounds with trees of `extent`, or of the root alone; None if it cannot be captured."""
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
        self._publish(nodes, handle)

    def _publish(self, nodes: int, handle: int) -> None:
        """Enqueue a round's entry and, if `handle` is not 0, whether the loop ends."""
        block = self._rounds.blocks[nodes]
        launch(
            self._rounds.kernels,
            "publish",
            self._target.stream,
            **{name: block.at[name] for name in ("length", "fault", "emitted")},
            ring=self._ring.ctypes.data,
            published=self._published.ctypes.data,
            stop=self._stop.ctypes.data,
            round=self._round,
            handle=handle,
            most=self.ahead,
            rounds=self.ahead,
            batch=self._target.batch_size,
            nodes=nodes,
        )

    def _entries(self, nodes: int) -> NDArray[np.int32]:
        """Return the ring as entries of rounds with `nodes` nodes."""
        shape = self.ahead, self._target.batch_size, nodes + 2
        return self._ring[: int(np.prod(shape))].reshape(shape)

    def next_entry(self) -> Entries:
        """Wait for the next round under way and return its entry; raises ExecutionError."""
        flight, self._flight = self._flight, None  # stays None if the device fails
        assert flight
        if not self._rounds.device.reached(self._published, flight.read + 1, self._target.stream):
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
        return [(draft, fault, emitted[:length]) for draft, (length, fault, *emitted) in told]

    def land(self) -> Iterator[Entries]:
        """Stop the device after the round it is in, and yield the entries not read yet; exhaust the iterator."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        self._stop[:] = 1
        self._target.wait()
        while flight.read < self._published[0]:
            yield self._read(flight)
        if flight.faults:
            self._rounds.forget_faults(flight.nodes)

    def leave(self, slot: int) -> bool:
        """Stop the rounds of a slot's ended sequence; return whether all other sequences in them have ended too."""
        drafts = self._flight.drafts if self._flight else []
        if all(draft.sequence.slot != slot for draft in drafts):  # it ended with earlier rounds
            return False
        self._stop[:] = 1
        return all(d.sequence.slot == slot or d.sequence.finish_reason for d in drafts)

    def abandon(self) -> None:
        """Stop the rounds under way; their entries are never read."""
        self._stop[:], self._flight = 1, None
        self._loops.clear()
