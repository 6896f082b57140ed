"""Which pages of the key/value caches are whose: a list of pages for each slot, and for each page how many have it.

A slot's row r is row `r % rows` of its page `r // rows`, in the caches of both models, which have one table. Slots have
whole pages of a common prefix together, of committed rows alone, so every page is written by one slot. What a text
leaves behind stays its slot's until others need the pages; those go first that have been idle for longest.
"""

from __future__ import annotations

import numpy as np


class Pages:
    """`count` pages of `rows` rows, 1 … `count`; page 0 is nobody's, and where a slot has no page of its own.

    `table int32[slots, capacity / rows]` is what the kernels read; `version` goes up whenever it changes. Not to be
    used from two threads at once.
    """

    def __init__(self, slots: int, capacity: int, rows: int, count: int) -> None:
        self.rows, self.count, self.version = rows, count, 0
        self.table = np.zeros((slots, capacity // rows), dtype=np.int32)
        self.of: list[list[int]] = [[] for _ in range(slots)]  # each slot's pages, in the order of their rows
        self._slots = [0] * (count + 1)  # how many have a page
        self._free = list(range(count, 0, -1))
        self._idle = dict.fromkeys(range(slots))  # slots that nobody decodes in, idle for longest first
        self._spoiled = set[int]()

    def needed(self, rows: int) -> int:
        """Pages that so many rows of a text lie in, as many as a slot can have at most."""
        return min(-(-rows // self.rows), self.table.shape[1])

    def usable(self, slot: int, source: int, rows: int) -> int:
        """Of the first `rows` rows of `source` those that a slot can go on from: whole pages, but for its own rows."""
        part = self.of[source][rows // self.rows :][:1] if slot == source and rows % self.rows else []
        return rows if part and self._slots[part[0]] == 1 else rows - rows % self.rows

    def take(self, slot: int, source: int, rows: int, max_rows: int) -> bool:
        """A text of up to `max_rows` rows gets an idle slot, and keeps the first `rows` of `source`, as `usable` says.

        False where those that are decoded leave too few pages; then nothing is changed.
        """
        kept = self.of[source][: self.needed(rows)]
        busy = {page for other, pages in enumerate(self.of) if other not in self._idle for page in pages} | {*kept}
        more = self.needed(max_rows) - len(kept)
        if more > self.count - len(busy):
            return False
        for page in kept:
            self._slots[page] += 1
        self._cut(slot, 0)
        self._idle.pop(slot, None)
        for other in self._idle:
            while self.of[other] and len(self._free) < more:
                self._cut(other, len(self.of[other]) - 1)
        fresh = [self._free.pop() for _ in range(more)]
        for page in fresh:
            self._slots[page] = 1
        self.of[slot] = kept + fresh
        self.table[slot, : len(self.of[slot])] = self.of[slot]
        self.version += 1
        return True

    def release(self, slot: int, rows: int, spoiled: bool = False) -> None:
        """A text has ended, of which `rows` rows stay. Spoiled: what it wrote may be no numbers."""
        freed = self._cut(slot, self.needed(rows))
        self._spoiled.update(freed if spoiled else ())
        self._idle[slot] = None

    def spoiled(self, slot: int) -> list[int]:
        """Pages that a slot got and must erase, told once: others' rows in them may be no numbers."""
        found = [page for page in self.of[slot] if page in self._spoiled]
        self._spoiled.difference_update(found)
        return found

    def _cut(self, slot: int, count: int) -> list[int]:
        """Leave a slot its first `count` pages; those of the others that nobody has any more."""
        cut, self.of[slot] = self.of[slot][count:], self.of[slot][:count]
        for page in cut:
            self._slots[page] -= 1
        freed = [page for page in cut if not self._slots[page]]
        self._free += freed
        self.table[slot, count:] = 0
        return freed
