"""Pages of the KV caches: a list of pages for each slot, and the number of slots that have each page.

A slot's row r is row `r % rows` of its page `r // rows`, in the caches of both models, which share one table. Slots
share whole pages of a common prefix that hold only committed rows, so at most one slot writes a page. When a sequence
ends, its rows stay in its slot until other sequences need the pages; the slot that has been idle for longest loses its
pages first.
"""

from __future__ import annotations

import numpy as np

from specbuild.runtime.backends.gpu.device import Device

_ALIGNED = 64  # int32 numbers in 256 bytes: TensorRT wants addresses that are multiples


class PagePool:
    """`count` pages of `rows` rows, numbered 1 to `count`; page 0 has no owner, and stands where a slot has no page.

    `table int32[slots, capacity / rows]` is what the kernels read; `version` increases whenever it changes. Not
    thread-safe.
    """

    def __init__(self, slots: int, capacity: int, rows: int, count: int) -> None:
        self.rows, self.count, self.version = rows, count, 0
        self.table = np.zeros((slots, capacity // rows), dtype=np.int32)
        self.of: list[list[int]] = [[] for _ in range(slots)]  # each slot's pages, in row order
        self._slots = [0] * (count + 1)  # how many slots have each page
        self._free = list(range(count, 0, -1))
        self._idle = dict.fromkeys(range(slots))  # slots without a running sequence, idle for longest first
        self._spoiled = set[int]()  # pages that may hold NaN

    def needed(self, rows: int) -> int:
        """Return the number of pages that `rows` rows of a sequence need, at most as many as a slot can have."""
        return min(-(-rows // self.rows), self.table.shape[1])

    def usable(self, slot: int, source: int, rows: int) -> int:
        """Return how many of the first `rows` rows of slot `source` a sequence in `slot` can keep.

        These are whole pages; but all `rows` if `source` is `slot` itself and no other slot shares the last page.
        """
        part = self.of[source][rows // self.rows :][:1] if slot == source and rows % self.rows else []
        return rows if part and self._slots[part[0]] == 1 else rows - rows % self.rows

    def take(self, slot: int, source: int, rows: int, max_rows: int) -> bool:
        """Give an idle slot pages for a new sequence; return False, changing nothing, if running ones leave too few.

        Args:
            slot: The idle slot.
            source: The slot whose first rows the sequence keeps; may be `slot`.
            rows: How many rows it keeps, as `usable` says.
            max_rows: Maximum number of rows of the sequence.
        """
        shared = self.of[source][: self.needed(rows)]
        busy = {page for other, pages in enumerate(self.of) if other not in self._idle for page in pages} | {*shared}
        more = self.needed(max_rows) - len(shared)
        if more > self.count - len(busy):
            return False
        for page in shared:
            self._slots[page] += 1
        self._cut(slot, 0)
        self._idle.pop(slot, None)
        for other in self._idle:
            while self.of[other] and len(self._free) < more:
                self._cut(other, len(self.of[other]) - 1)
        fresh = [self._free.pop() for _ in range(more)]
        for page in fresh:
            self._slots[page] = 1
        self.of[slot] = shared + fresh
        self.table[slot, : len(self.of[slot])] = self.of[slot]
        self.version += 1
        return True

    def release(self, slot: int, rows: int, spoiled: bool = False) -> None:
        """Mark a slot idle when its sequence has ended.

        Args:
            slot: The slot.
            rows: How many of its first rows stay; pages that hold only later rows become free.
            spoiled: Whether the pages that become free may hold NaN.
        """
        freed = self._cut(slot, self.needed(rows))
        self._spoiled.update(freed if spoiled else ())
        self._idle[slot] = None

    def spoiled(self, slot: int) -> list[int]:
        """Return the slot's pages that may hold NaN, for the caller to erase, and forget that they do."""
        pages = [page for page in self.of[slot] if page in self._spoiled]
        self._spoiled.difference_update(pages)
        return pages

    def _cut(self, slot: int, count: int) -> list[int]:
        """Take all but the first `count` pages from a slot; return those of them that no slot has any more."""
        cut, self.of[slot] = self.of[slot][count:], self.of[slot][:count]
        for page in cut:
            self._slots[page] -= 1
        freed = [page for page in cut if not self._slots[page]]
        self._free += freed
        self.table[slot, count:] = 0
        return freed


class PageTable(PagePool):
    """See `Pages`: `tensor int32[B, T]` for steps of all slots, and single rows for steps of one."""

    def __init__(self, device: Device, slots: int, capacity: int, rows: int, count: int) -> None:
        super().__init__(slots, capacity, rows, count)
        shape = self.table.shape
        self._device, self._uploaded = device, 0
        self.tensor, self._staged = device.empty(shape, np.int32), device.pinned(shape, np.int32)
        self._lines = device.empty((slots, -(-shape[1] // _ALIGNED) * _ALIGNED), np.int32)

    @property
    def stale(self) -> bool:
        """Return whether the device's table is older than the host's."""
        return self._uploaded != self.version

    def slot_rows(self, slot: int) -> int:
        """Return how many rows the slot's pages have."""
        return len(self.of[slot]) * self.rows

    def update(self, stream: int) -> None:
        """Copy the table to the device and wait until it is there; nothing that runs meanwhile may read it."""
        self._uploaded = self.version
        self._staged[:] = self.table
        self._device.upload(self.tensor, self._staged, stream)
        self._device.copy_rows(self._lines, self.tensor, stream)
        self._device.wait(stream)

    def line(self, slot: int) -> int:
        """Return the address of a slot's row of the table, a multiple of 256."""
        return self._lines.address + slot * self._lines.nbytes // self._lines.shape[0]
