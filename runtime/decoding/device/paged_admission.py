"""Admission with paged caches: a slot comes with all the pages that its sequence may ever need.

No sequence can therefore run out of pages while it decodes, whatever it emits. `pick` only changes the host's page
table, while rounds run; `enter` copies the table to the device between two rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from specbuild.runtime.backends.gpu.device import Pages
from specbuild.runtime.backends.gpu.executor import StandardExecutor
from specbuild.runtime.decoding.admission import Admission
from specbuild.runtime.drafting.model import ModelDrafter
from specbuild.runtime.errors import OptionError
from specbuild.runtime.requests.sequence import Sequence


class PagedAdmission(Admission):
    """Assigns slots together with their pages; see `Admission`."""

    _target: StandardExecutor

    def __init__(
        self,
        target: StandardExecutor,
        drafter: ModelDrafter | None,
        pages: Pages,
        needed: Callable[[Sequence], int],
        *reuse: bool,
    ) -> None:
        """Start with empty slots.

        Args:
            target: Executor whose slots are assigned.
            drafter: Holds the draft's cache, which has the same slots; None: no model drafts.
            pages: Pages of both caches.
            needed: Returns how many rows a sequence may ever write.
            *reuse: `prefix_caching` and `generated`, see `Admission`.
        """
        super().__init__(target, drafter, *reuse)
        self._pages, self._needed = pages, needed
        self.page_tokens = pages.count * pages.rows

    def check(self, sequence: Sequence) -> None:
        """See `Admission.check`; raises OptionError if all the pages together are too few."""
        self._fits(self._needed(sequence))

    def _fits(self, rows: int) -> None:
        if self._pages.needed(rows) > self._pages.count:
            raise OptionError(
                f"the text may take {rows} rows, the caches have {self.page_tokens}: give a shorter one, ask for fewer "
                "with max_new_tokens, or load with more kv_cache_tokens"
            )

    def pick(self, sequence: Sequence, free: Seq[int]) -> int | None:
        """See `Admission.pick`; also gives the slot its pages, and keeps those that hold a prefix of the prompt."""
        slot = super().pick(sequence, free)
        pages, slots = self._pages, range(self._target.batch_size)
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
        """Copy a changed table to the device once nothing runs, and erase the slots' pages that may hold NaN."""
        if not self._pages.stale:
            return
        self._target.wait()
        if self._drafter and isinstance(draft := self._drafter.executor, StandardExecutor):
            draft.wait()
        for page in (page for slot in slots for page in self._pages.spoiled(slot)):
            self._erase(page)
        self._pages.update(self._target.stream)

    def vacate(self, slot: int) -> None:
        """Mark a slot empty; pages that a failed sequence wrote are erased when another slot gets them."""
        self._last[slot] = None

    def borrow(self, slot: int, rows: int) -> None:
        """See `Admission.borrow`; raises OptionError if the pages are too few."""
        self._fits(rows)
        self._pages.take(slot, 0, 0, rows)
        self._turn([slot])
        self.vacate(slot)

    def reusable(self, slot: int) -> int:
        """See `Admission.reusable`; other slots may have got the last pages since."""
        return min(super().reusable(slot), self._target.rows(slot))

    def release(self, slot: int) -> None:
        """See `Admission.release`."""
        super().release(slot)
        last = self._last[slot]
        self._pages.release(slot, self.reusable(slot), bool(last and last.error))
