"""Slots whose rows are pages, given with the slot: as many as its sequence may ever need.

Whatever the sequence is going to emit, so none is ever short of pages in mid-flight. What `pick` does is the host's own
book-keeping, while rounds run; `enter` brings it to the device between two rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from specbuild.runtime.backends.gpu.device import PageTable
from specbuild.runtime.backends.gpu.executor import StandardExecutor
from specbuild.runtime.decoding.admission import Admission
from specbuild.runtime.drafting.model import KeepsRows
from specbuild.runtime.errors import OptionError
from specbuild.runtime.requests.sequence import Sequence


class PagedAdmission(Admission):
    """See `Admission`."""

    def __init__(
        self,
        target: StandardExecutor,
        drafts: KeepsRows | None,
        table: PageTable,
        needed: Callable[[Sequence], int],
        prefix_caching: bool = True,
        generated: bool = True,
    ) -> None:
        """`needed`: rows that a sequence may ever write."""
        super().__init__(target, drafts, prefix_caching, generated)
        self._paged, self._table, self._needed = target, table, needed
        self.page_tokens = table.pages.count * table.pages.rows

    def check(self, sequence: Sequence) -> None:
        """See `Admission.check`: all the pages together may be too few."""
        self._fits(self._needed(sequence), "ask for fewer with max_new_tokens, or load with more kv_cache_tokens")

    def _fits(self, rows: int, advice: str) -> None:
        pages = self._table.pages
        if pages.needed(rows) > pages.count:
            raise OptionError(f"the text may take {rows} rows, the caches have {pages.count * pages.rows}: {advice}")

    def pick(self, sequence: Sequence, free: Seq[int]) -> int | None:
        """See `Admission.pick`: with a slot come its pages, and what they hold of the prompt already."""
        slot = super().pick(sequence, free)
        pages, slots = self._table.pages, range(self._target.batch_size)
        assert slot is not None
        usable = [pages.usable(slot, other, self.common(sequence, other)) for other in slots]
        source = max(slots, key=lambda other: (usable[other], other == slot))
        if not pages.take(slot, source, usable[source], self._needed(sequence)):
            return None
        self._admit(sequence, slot, source, usable[source])
        return slot

    def enter(self, sequences: Seq[Sequence]) -> None:
        """See `Admission.enter`."""
        self._turn(sequence.slot for sequence in sequences)

    def _turn(self, slots: Iterable[int]) -> None:
        """Bring the table to the device where it has changed, once nothing runs; a slot's new pages hold no NaN."""
        if not self._table.stale:
            return
        self._paged.wait()
        if self._drafts and isinstance(draft := self._drafts.executor, StandardExecutor):
            draft.wait()
        for page in (page for slot in slots for page in self._table.pages.spoiled(slot)):
            self._erase(page)
        self._table.update(self._paged.stream)

    def vacate(self, slot: int) -> None:
        """Mark a slot empty; what a failed sequence wrote is erased when its pages get another owner."""
        self._last[slot] = None

    def borrow(self, slot: int, rows: int) -> None:
        """See `Admission.borrow`. Raises OptionError where the pages are too few."""
        self._fits(rows, "give a shorter text, or load with more kv_cache_tokens")
        self._table.pages.take(slot, 0, 0, rows)
        self._turn([slot])
        self.vacate(slot)

    def kept(self, slot: int) -> int:
        """See `Admission.kept`: others may have got its last pages since."""
        return min(super().kept(slot), self._paged.rows(slot))

    def release(self, slot: int) -> None:
        """See `Admission.release`."""
        super().release(slot)
        last = self._last[slot]
        self._table.pages.release(slot, self.kept(slot), bool(last and last.error))
