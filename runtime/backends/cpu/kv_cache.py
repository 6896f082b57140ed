"""The key/value cache of one model: a slot per sequence, a row per token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class KVCache:
    """`float32[2·layers, slots, heads, capacity, head_dim]`; keys of layer i at 2i, values at 2i + 1.

    Rows past a sequence's committed length are garbage by definition. Pages are mapped when first written, so an
    unused slot costs address space only.
    """

    def __init__(self, layers: int, slots: int, heads: int, capacity: int, head_dim: int) -> None:
        self.rows: NDArray[np.float32] = np.zeros((2 * layers, slots, heads, capacity, head_dim), dtype=np.float32)
        self.layers, self.slots, self.capacity = layers, slots, capacity

    def view(self, layer: int, value: bool, slot: int) -> NDArray[np.float32]:
        """One layer's keys or values of one slot, `[1, heads, capacity, head_dim]`, contiguous, not a copy."""
        return self.rows[2 * layer + value, slot : slot + 1]

    def gather(self, slot: int, rows: Sequence[int], start: int) -> None:
        """Move `rows` to `start, start + 1, …` in every layer: what commits an accepted path."""
        stay = 0
        while stay < len(rows) and rows[stay] == start + stay:
            stay += 1
        if stay < len(rows):
            moved = self.rows[:, slot, :, list(rows[stay:])]
            self.rows[:, slot, :, start + stay : start + len(rows)] = moved.transpose(1, 2, 0, 3)

    def copy(self, slot: int, source: int, rows: int) -> None:
        """Copy the first rows of another slot."""
        self.rows[:, slot, :, :rows] = self.rows[:, source, :, :rows]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole cache, every slot."""
        return self.rows.nbytes
