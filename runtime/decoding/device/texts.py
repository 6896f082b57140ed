"""The slots' texts in a device's memory, which it continues by itself while rounds follow each other.

Where steps have the same rows whatever is drafted, a drafted token costs no row, and the host would only be late. So
a kernel looks for the longest earlier occurrence of a text's end and drafts what followed it, as `drafting/lookup.py`
does on the host, or habits (`drafting/habits.py`). The device keeps habits of its own: what it emits while rounds
follow each other, and what common texts say.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.backends.gpu.device import Tensor
from specbuild.runtime.drafting.habits import SLOTS, Common
from specbuild.runtime.errors import SpecbuildError, one_line
from specbuild.runtime.requests.sequence import Sequence

from .rounds import Rounds
from .state import launch

COMMON = 0xFFFFFFFF  # the salt of what common texts say
Keys = NDArray[np.uint64]


def habit_keys(before: NDArray[np.int64], last: NDArray[np.int64], salt: int) -> Keys:
    """Return the hashes of two tokens each, `uint64[N]`, as the kernel computes them; `before` may be −1: no token."""
    found: Keys = (before.astype(np.uint32).astype(np.uint64) << np.uint64(32)) | last.astype(np.uint64)
    found ^= np.uint64(salt * 0xD1B54A32D192ED03 % 2**64)
    found = (found ^ found >> np.uint64(32)) * np.uint64(0x9E3779B97F4A7C15)
    return (found ^ found >> np.uint64(29)) * np.uint64(0xBF58476D1CE4E5B9)


def table_of(common: Common | None) -> Keys:
    """Return habits that know what common texts say, `uint64[SLOTS]`: half of a key, and the token that follows."""
    table = np.zeros(SLOTS, np.uint64)
    if common:
        keys = habit_keys((common.keys >> 32) - 1, common.keys & 0xFFFFFFFF, COMMON)
        table[keys & np.uint64(SLOTS - 1)] = keys >> np.uint64(32) << np.uint64(32) | common.next.astype(np.uint64)
    return table


class Texts:
    """Every token of each slot's text, and how many tokens may be drafted for it."""

    def __init__(self, rounds: Rounds, common: Common | None = None) -> None:
        """Allocate it; `works` says whether the device has the kernel.

        Args:
            rounds: The rounds whose trees the texts become.
            common: What common texts say.
        """
        self._rounds, self._device, target = rounds, rounds.device, rounds.target
        shape = target.batch_size, target.spec.capacity
        self._texts, self._twin = self._device.empty(shape, np.int32), self._device.pinned(shape, np.int32)
        self._most, self._asked = self._device.empty(shape[:1], np.int32), self._device.pinned(shape[:1], np.int32)
        self._habits, self._salts = self._device.empty((SLOTS,), np.uint64), self._device.empty(shape[:1], np.uint32)
        self._table, self._whose = self._device.pinned((SLOTS,), np.uint64), self._device.pinned(shape[:1], np.uint32)
        self._table[:] = table_of(common)
        self._known = list[tuple[Sequence | None, int]]([(None, 0)] * target.batch_size)  # tokens the device has
        self.works = self._tried()

    def _tried(self) -> bool:
        """Return whether the kernel can be launched; this runs it once, for no sequence, before any capture."""
        rounds, nodes = self._rounds, self._rounds.target.bucket(1)
        try:
            rounds.blocks[nodes].host["counts"][:] = 0
            rounds.blocks[nodes].upload("counts", "counts", rounds.target.stream)
            self._device.upload(self._habits, self._table, rounds.target.stream)
            self.draft(nodes)
            rounds.target.wait()
        except SpecbuildError as error:
            self._device.uncaptured.append(one_line(error))
            return False
        return True

    def update(self, asked: Iterable[tuple[Sequence, int]], nodes: int) -> None:
        """Enqueue the upload of what the device may not have, before the first round of several.

        Args:
            asked: Every sequence of the rounds, and how many tokens to draft for it at most.
            nodes: Nodes of a sequence in a step.
        """
        stream, block = self._rounds.target.stream, self._rounds.blocks[nodes]
        self._asked[:] = block.host["length"][:] = 0
        for sequence, most in asked:
            slot, end = sequence.slot, len(sequence.tokens)
            known, begin = self._known[slot]
            begin = begin if known is sequence else 0
            if begin < end:
                new = self._twin[slot, begin:end]
                new[:] = sequence.history[begin:]
                at = self._texts.address + (slot * self._texts.shape[1] + begin) * new.itemsize
                self._device.upload(Tensor(at, new.shape, new.dtype), new, stream)
            emitted = sequence.output[-min(end - begin, len(sequence.output), nodes) :] if begin < end else []
            block.host["length"][slot] = len(emitted)  # the device learns them as habits
            block.host["emitted"][slot, : len(emitted)] = emitted
            self._known[slot], self._asked[slot] = (sequence, end), most
            salt = sequence.params.cache_salt
            self._whose[slot] = 0 if salt is None else 1 + hash(salt) % (COMMON - 1)
        self._device.upload(self._most, self._asked, stream)
        self._device.upload(self._salts, self._whose, stream)
        block.upload("length", "emitted", stream)

    def draft(self, nodes: int) -> None:
        """Enqueue the drafts of a round, in place of trees from the host."""
        target, block, slots = self._rounds.target, self._rounds.blocks[nodes].at, self._rounds.slots.at
        launch(
            self._rounds.kernels,
            "continue_text",
            target.stream,
            **{name: block[name] for name in ("length", "emitted", "tokens", "parents", "counts", "fault")},
            texts=self._texts,
            most=self._most,
            root_position=slots["cache_len"],
            roots=slots["roots"],
            batch=target.batch_size,
            nodes=nodes,
            capacity=self._texts.shape[1],
            habits=self._habits,
            salts=self._salts,
            slots=SLOTS,
        )
