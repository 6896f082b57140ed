"""The KV cache of one model: a slot per sequence, a row per token."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class KVCache:
    """`float32[2·layers, slots, heads, capacity, head_dim]`: keys of layer i at 2i, values at 2i + 1.

    Rows past a sequence's committed length are garbage. Memory pages are mapped when first written, so rows that no
    text has reached take only address space.
    """

    def __init__(self, layers: int, slots: int, heads: int, capacity: int, head_dim: int) -> None:
        self.rows = _zeros((2 * layers, slots, heads, capacity, head_dim))
        self.layers, self.slots, self.capacity = layers, slots, capacity

    def view(self, layer: int, value: bool) -> NDArray[np.float32]:
        """Return a view of one layer's keys or values: `[slots, heads, capacity, head_dim]`, contiguous."""
        rows: NDArray[np.float32] = self.rows[2 * layer + value]
        return rows

    def gather(self, slot: int, rows: Sequence[int], start: int) -> None:
        """Move `rows` to rows `start, start + 1, …` in every layer, which commits an accepted path."""
        stay = 0
        while stay < len(rows) and rows[stay] == start + stay:
            stay += 1
        if stay < len(rows):
            moved = self.rows[:, slot, :, list(rows[stay:])]
            self.rows[:, slot, :, start + stay : start + len(rows)] = moved.transpose(1, 2, 0, 3)

    def copy(self, slot: int, source: int, rows: int) -> None:
        """Copy the first `rows` rows of slot `source` to `slot`."""
        self.rows[:, slot, :, :rows] = self.rows[:, source, :, :rows]

    @property
    def nbytes(self) -> int:
        """Size of the whole cache in bytes, all slots included."""
        return self.rows.nbytes


def _zeros(shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return zeros in small pages: NumPy asks for pages of 2 MB, of which a text's first token would map all."""
    count = math.prod(shape)
    if not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return np.zeros(shape, dtype=np.float32)
    try:
        memory = mmap.mmap(-1, 4 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):
        raise MemoryError(f"{4 * count:,} bytes of caches") from None
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype=np.float32).reshape(shape)
