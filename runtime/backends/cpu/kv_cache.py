"""The KV cache of one model: a slot per sequence, a row per token."""

from __future__ import annotations

import math
import mmap
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.bundle.manifest import CacheShape


class KVCache:
    """Each layer's keys and values, `float32[slots, heads, capacity, size]`; those of one shape are one array.

    Rows past a sequence's committed length are garbage. Memory pages are mapped when first written, so rows that no
    text has reached take only address space.

    A recurrence has states too, `float32[slots, numbers]` by layer, of the first `state_rows[slot]` rows of a slot. Its
    rows are what states are made of: where some are taken back, the states are made of the first row on again.
    """

    def __init__(self, shapes: Sequence[CacheShape], slots: int, capacity: int) -> None:
        sizes = [(each.heads, size) for each in shapes for size in (each.key, each.value)]
        counts = Counter(sizes)
        arrays = {size: _zeros((count, slots, size[0], capacity, size[1])) for size, count in counts.items()}
        unused = {size: iter(array) for size, array in arrays.items()}
        self.views = [next(unused[size]) for size in sizes]  # keys of layer i at 2i, values at 2i + 1, all contiguous
        self._arrays = list(arrays.values())
        self.states = {layer: _zeros((slots, each.state)) for layer, each in enumerate(shapes) if each.state}
        self.state_rows = np.zeros(slots, dtype=np.int32)

    def rewind(self, slot: int, rows: int) -> None:
        """Forget a slot's states if they are of more than its first `rows` rows."""
        if self.state_rows[slot] > rows:
            self.state_rows[slot] = 0

    def gather(self, slot: int, rows: Sequence[int], start: int) -> None:
        """Move `rows` to rows `start, start + 1, …` in every layer, which commits an accepted path."""
        self.rewind(slot, start)
        stay = 0
        while stay < len(rows) and rows[stay] == start + stay:
            stay += 1
        if stay < len(rows):
            for array in self._arrays:
                moved = array[:, slot, :, list(rows[stay:])]
                array[:, slot, :, start + stay : start + len(rows)] = moved.transpose(1, 2, 0, 3)

    def copy(self, slot: int, source: int, rows: int) -> None:
        """Copy the first `rows` rows of slot `source` to `slot`."""
        for array in self._arrays:
            array[:, slot, :, :rows] = array[:, source, :, :rows]
        for state in self.states.values():
            state[slot] = state[source]
        self.state_rows[slot] = self.state_rows[source]
        self.rewind(slot, rows)

    @property
    def nbytes(self) -> int:
        """Size of the whole cache in bytes, all slots included."""
        return sum(array.nbytes for array in (*self._arrays, *self.states.values()))


def _zeros(shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return zeros in small pages: NumPy asks for pages of 2 MB, of which a text's first token would map all."""
    count = math.prod(shape)
    try:
        memory = mmap.mmap(-1, 4 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):
        raise MemoryError(f"{4 * count:,} bytes of caches") from None
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype=np.float32).reshape(shape)
