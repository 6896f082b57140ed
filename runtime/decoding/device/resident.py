"""Rounds that follow each other on the device: one graph repeats them, and a ring tells the host of each.

The host reads a round's entry while the device is in the next one. As soon as other sequences decode, or the host can
draft from the text itself, it raises `stop`: the device ends after the round it is in, and what it has done until then
counts. docs/device-loop.md says what the graph holds, and when rounds are `DeviceLoop`'s one by one.
"""

from __future__ import annotations

import platform
from collections.abc import Hashable
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.backends import nvtx
from specbuild.runtime.backends.gpu.device import Kernels, Step
from specbuild.runtime.backends.gpu.executor import StandardExecutor
from specbuild.runtime.drafting.model import DrafterName, ModelDrafter
from specbuild.runtime.errors import ExecutionError, OptionError, SpecbuildError, one_line
from specbuild.runtime.requests.sequence import Sequence

from .loop import DeviceLoop, max_nodes
from .state import MAX_GRAPHS, ProcessorFlags, launch
from .tree_grower import Extent

AHEAD = 32  # rounds that one launch of a graph may do
_ORDERED = ("x86_64", "AMD64")  # machines that read in the order in which a device writes


@dataclass(slots=True)
class Flight:
    """Rounds under way: whose, with drafted trees or the root alone, and where the host reads of them."""

    sequences: list[Sequence]
    grown: bool
    nodes: int
    entries: NDArray[np.int32]  # [ahead, B, nodes + 2]: length, fault, emitted
    read: int  # the entry that is next
    faults: bool = False


class ResidentLoop(DeviceLoop):
    """A `DeviceLoop` that lets the device go on by itself where nothing needs the host."""

    def __init__(
        self,
        target: StandardExecutor,
        draft: StandardExecutor | None,
        kernels: Kernels,
        eos: frozenset[int],
        drafter: DrafterName | None = None,
        ahead: int = AHEAD,
        hosted: ModelDrafter | None = None,
    ) -> None:
        """`ahead`: rounds in the ring, and in one launch at most; the rest as in `DeviceLoop`.

        Raises OptionError on a host that may read an entry before the count that announces it.
        """
        if (machine := platform.machine()) not in _ORDERED:
            raise OptionError(f"a resident loop needs an x86_64 host, this is {machine}: load without `resident`")
        super().__init__(target, draft, kernels, eos, drafter, hosted)
        device, entry = self._device, target.batch_size * (target.model.buckets[-1] + 2)
        self.ahead = ahead
        self._flight: Flight | None = None
        self._ring = device.pinned((ahead * entry,), np.int32)
        self._published, self._stop = device.pinned((1,), np.uint64), device.pinned((1,), np.uint32)
        self._round, self._first = device.empty((1,), np.uint64), device.pinned((1,), np.uint64)
        self._loops = dict[Hashable, Step]()
        if hosted:
            device.uncaptured.append("rounds do not follow each other: the host grows this draft's trees")
        capturable = hosted is None and all(executor.model.capturable for executor in self._executors)
        self._captures = capturable and self._publishes()

    def _publishes(self) -> bool:
        """Whether `publish` can be launched; it has run once then, as what is captured must have."""
        try:
            self._publish(self._target.model.buckets[0], 0)
            self._target.wait()
        except SpecbuildError as error:
            self._device.uncaptured.append(one_line(error))
            return False
        return True

    def run(self, sequences: Seq[Sequence]) -> None:
        """A round; of those that the device has done by itself one, or all that are left where it has to stop."""
        if self._flight and not self._goes_on(self._flight, sequences):
            self._land(sequences)
            sequences = [s for s in sequences if not s.finish_reason]
        if self._flight or self._fly(sequences):
            self._read(sequences)
        else:
            super().run(sequences)

    def _goes_on(self, flight: Flight, sequences: Seq[Sequence]) -> bool:
        """Whether the same sequences decode, and the host has drafted nothing for them."""
        same = {id(s) for s in sequences} == {id(s) for s in flight.sequences}
        return same and all(tree is None or len(tree) == 1 for tree in self._propose(sequences))

    def _fly(self, sequences: Seq[Sequence]) -> bool:
        """Launch as many rounds as may follow each other; False where it is not at least two."""
        if not sequences or not self._captures or nvtx.enabled:
            return False
        if any(not s.output or s.params.logprobs is not None for s in sequences):  # the host reads prompts, and logits
            return False
        trees = self._propose(sequences)
        nodes = self._target.bucket(max(max_nodes(s, tree) for s, tree in zip(sequences, trees, strict=True)))
        grown = all(tree is None for tree in trees)
        rounds = self._rounds(sequences, nodes, grown) if grown or nodes == 1 else 0
        if rounds < 2:
            return False
        stream, asked = self._target.stream, ProcessorFlags.of([s.params for s in sequences])
        extent = None
        if self._model and grown:
            self._model.catch_up(sequences)
            self._slots.update([(s, s.tree) for s in sequences], stream)
            extent = Extent.of([s.tree for s in sequences if s.tree], self._model.executor, nodes)
        else:
            self._draft(sequences, trees, nodes, asked)
        step = self.capture(nodes, extent, asked)
        if step is None:
            self._captures = False
            self._target.wait()  # an ordinary round may begin on the draft's stream
            return False
        first = self.ahead - rounds  # the loop ends behind the ring's last entry
        self._first[:] = self._published[:] = first
        self._stop[:] = 0
        self._device.upload(self._round, self._first, stream)
        step()
        self._flight = Flight(list(sequences), grown, nodes, self._entries(nodes), first)
        return True

    def _rounds(self, sequences: Seq[Sequence], nodes: int, grown: bool) -> int:
        """How many rounds may follow each other.

        As many as the ring holds, and as the caches surely have room for; none after one sequence is surely over.
        """
        rounds, shapes = self.ahead, [s.tree for s in sequences if s.tree]
        last = min(executor.spec.max_positions for executor in self._executors)
        for s in sequences:
            rooms, emitted = [self._target.rows(s.slot) - nodes - s.cached], 1
            if self._model and grown and s.tree:
                rooms += [self._room(s, shapes), last - s.tree.nodes - len(s.tokens)]
                emitted += s.tree.depth
            rounds = min(rounds, s.limit - len(s.tokens), min(rooms) // emitted + 1)
        return rounds

    def capture(self, nodes: int, extent: Extent | None, asked: ProcessorFlags) -> Step | None:
        """A graph of rounds with trees that the draft grows, or of the root alone; None where there cannot be one."""
        key = nodes, extent, asked
        if key not in self._loops:
            if len(self._loops) >= MAX_GRAPHS:
                self._loops.clear()
            step = self._device.loop(lambda handle: self._body(handle, nodes, extent, asked), self._target.stream)
            if step is None:
                return None
            self._loops[key] = step
        return self._loops[key]

    def _body(self, handle: int, nodes: int, extent: Extent | None, asked: ProcessorFlags) -> None:
        """Enqueue a round: its trees, what follows from them, and the ring's entry."""
        stream, block = self._target.stream, self._blocks[nodes]
        if self._model and extent:
            self._device.after(self._model.executor.stream, stream)
            self._model.grow(extent, asked, block)
            self._device.after(stream, self._model.executor.stream)
        else:
            self._device.copy(block.at["tokens"], self._slots.at["roots"], stream)
        self._advance(nodes, asked)
        self._publish(nodes, handle)

    def _publish(self, nodes: int, handle: int) -> None:
        """Enqueue a round's entry, and where there is a condition, its end."""
        block = self._blocks[nodes]
        launch(
            self._kernels,
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
        """The ring as rounds of so many nodes fill it."""
        shape = self.ahead, self._target.batch_size, nodes + 2
        return self._ring[: int(np.prod(shape))].reshape(shape)

    def _read(self, sequences: Seq[Sequence]) -> None:
        """Wait for the next round's entry, and emit what it says."""
        flight, self._flight = self._flight, None  # there is none any more if the device fails
        assert flight
        if not self._device.reached(self._published, flight.read + 1, self._target.stream):
            raise ExecutionError(f"the loop on the device ended before round {flight.read + 1}: report it")
        self._take(flight, sequences)
        self._flight = flight
        if flight.read == self.ahead:
            self._land(sequences)

    def _take(self, flight: Flight, sequences: Seq[Sequence]) -> None:
        """Emit what an entry says of those who still decode."""
        entry, still = flight.entries[flight.read], {id(s) for s in sequences}
        flight.read += 1
        flight.faults |= bool(entry[:, 1].any())
        for s in (s for s in flight.sequences if id(s) in still and not s.finish_reason):
            length, fault, *emitted = entry[s.slot].tolist()
            drafted = s.tree.nodes if flight.grown and s.drafts and s.tree else 0
            try:
                self._emit(s, flight.grown, fault, emitted[:length], drafted)
            except Exception as error:  # of this sequence alone: the others go on
                s.fail(error)

    def _land(self, sequences: Seq[Sequence]) -> None:
        """Stop the device after the round that it is in, and emit what nobody has read."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        self._stop[:] = 1
        self._target.wait()
        while flight.read < self._published[0]:
            self._take(flight, sequences)
            self.stats = self.stats.plus(rounds=1)
        if flight.faults:  # a slot's next sequence has none
            self._clear(self._blocks[flight.nodes])

    def logits(self, tokens: list[int], count: int = 1, nodes: int | None = None) -> NDArray[np.float32]:
        """See `DeviceLoop.logits`."""
        self._land(())
        return super().logits(tokens, count, nodes)

    def release(self, slot: int) -> None:
        """A sequence has ended: the rounds under way end as well; the next `run` reads what they did for others."""
        self._stop[:] = 1
        if self._flight and all(s.slot == slot or s.finish_reason for s in self._flight.sequences):
            with suppress(SpecbuildError):  # a device that failed says so in the next round
                self._land(())
        super().release(slot)

    def _settle(self) -> None:
        """See `DeviceLoop`; nobody reads any more what the rounds under way do."""
        self._stop[:], self._flight = 1, None
        super()._settle()
        self._loops.clear()
