"""The ring in which a device reports each round to the host while rounds follow each other."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.errors import SpecbuildError, one_line
from specbuild.runtime.requests.sequence import Sequence

from .memory import Block
from .rounds import Rounds

HEAD = 3  # numbers of an entry before the emitted tokens: how many there are, the fault, and the tree's nodes
NEVER = 2**31 - 1  # a position that no text reaches


class Ring:
    """Entries in pinned memory that the device writes: it counts an entry once it can be read, and never waits.

    The device ends its loop after the last entry, where the host says so, or where a text has reached its limit.
    """

    def __init__(self, rounds: Rounds, ahead: int) -> None:
        """Allocate it; `works` says whether the device has the kernel.

        Args:
            rounds: The rounds whose results are published.
            ahead: Entries of the ring.
        """
        device, batch = rounds.device, rounds.target.batch_size
        self._rounds, self._device, self.ahead = rounds, device, ahead
        self._memory = device.pinned((ahead * batch * (rounds.target.buckets[-1] + HEAD),), np.int32)
        self.published, self._stop = device.pinned((1,), np.uint64), device.pinned((1,), np.uint32)
        self._block = Block(device, {"round": ((1,), np.uint64), "ends": ((batch,), np.int32)})
        self.works = self._try()

    def _try(self) -> bool:
        """Return whether the kernel can be launched; this runs it once, as it must have before a capture."""
        try:
            self.publish(self._rounds.target.buckets[0], 0)
            self._rounds.target.wait()
        except SpecbuildError as error:
            self._device.uncaptured.append(one_line(error))
            return False
        return True

    def begin(self, sequences: Iterable[Sequence], rounds: int) -> int:
        """Enqueue what a loop of so many rounds begins with; return the index of its first entry."""
        first = self.ahead - rounds  # so the loop ends with the ring's last entry
        host = self._block.host
        host["round"][:] = self.published[:] = first
        self._stop[:], host["ends"][:] = 0, NEVER
        for sequence in sequences:
            host["ends"][sequence.slot] = sequence.request.max_tokens - 1
        self._block.upload("round", "ends", self._rounds.target.stream)
        return first

    def stop(self) -> None:
        """Let the device end after the round that it is in."""
        self._stop[:] = 1

    @property
    def stopped(self) -> bool:
        """Return whether the device was told to end."""
        return bool(self._stop[0])

    def entries(self, nodes: int) -> NDArray[np.int32]:
        """Return the entries of rounds with `nodes` nodes, `int32[ahead, B, HEAD + nodes]`."""
        shape = self.ahead, self._rounds.target.batch_size, nodes + HEAD
        return self._memory[: int(np.prod(shape))].reshape(shape)

    def publish(self, nodes: int, handle: int) -> None:
        """Enqueue a round's entry and, if `handle` is not 0, whether the loop ends."""
        at = self._rounds.blocks[nodes].at
        self._rounds.launch(
            "publish",
            **{name: at[name] for name in ("length", "fault", "counts", "emitted")},
            ring=self._memory.ctypes.data,
            published=self.published.ctypes.data,
            stop=self._stop.ctypes.data,
            **self._block.at,
            root_position=self._rounds.slots.at["cache_len"],
            handle=handle,
            most=self.ahead,
            rounds=self.ahead,
            nodes=nodes,
        )
