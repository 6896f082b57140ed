"""Who has which rows of the caches on a device: a slot has them all, or the pages that its sequence may ever need.

Pages are given with the slot, whatever the sequence is going to emit, so none is ever short of them in mid-flight. What
`pick` does is the host's own book-keeping, while rounds run; `enter` brings it to the device between two rounds.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.backends.gpu.executor import StandardExecutor
from specbuild.runtime.decoding.host_loop import Loop
from specbuild.runtime.drafting.model import ModelDrafter
from specbuild.runtime.errors import OptionError
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.tree import TreeSpec

from .tree_grower import TreeGrower


class CacheLoop(Loop):
    """A `Loop` over models on a device.

    `_model` drafts there, or `drafter` on the host with a model that is there; or neither.
    """

    _model: TreeGrower | None = None

    def __init__(self, target: StandardExecutor, eos: frozenset[int], drafter: ModelDrafter | None = None) -> None:
        super().__init__(target, drafter, target.model.chunk, eos)
        self._target, self._table = target, target.model.pages

    @property
    def draft_executor(self) -> StandardExecutor | None:
        """The draft model; None where none drafts."""
        return self._model.executor if self._model else super().draft_executor  # type: ignore[return-value]

    @property
    def page_tokens(self) -> int | None:
        """See `Loop.page_tokens`."""
        return self._table.pages.count * self._table.pages.rows if self._table else None

    @property
    def _executors(self) -> list[StandardExecutor]:
        return [executor for executor in (self._target, self.draft_executor) if executor]

    def _room(self, sequence: Sequence, specs: Seq[TreeSpec]) -> int:
        """Rows that a sequence's tree leaves in the draft's cache, its levels run in steps for the widest of `specs`.

        Negative where cache or model have no room for it.
        """
        draft, shape = self.draft_executor, sequence.tree
        if draft is None or shape is None:
            return 0
        if shape.expand * (shape.depth - 1) > draft.max_rows:
            return -1
        return draft.rows(sequence.slot) - self._level_rows(draft, shape, specs) - len(sequence.tokens)

    @staticmethod
    def _level_rows(draft: StandardExecutor, shape: TreeSpec, specs: Seq[TreeSpec]) -> int:
        """Rows behind the root's that a tree takes in the draft's cache."""
        return shape.expand * max(shape.depth - 2, 0) + draft.bucket(max(spec.expand for spec in specs))

    def check(self, sequence: Sequence) -> None:
        """See `Loop.check`: all the pages together may be too few."""
        self._fits(self._rows(sequence), "ask for fewer with max_new_tokens, or load with more kv_cache_tokens")

    def _fits(self, rows: int, advice: str) -> None:
        pages = self._table.pages if self._table else None
        if pages and pages.needed(rows) > pages.count:
            raise OptionError(f"the text may take {rows} rows, the caches have {pages.count * pages.rows}: {advice}")

    def _rows(self, sequence: Sequence) -> int:
        """Rows that a sequence may ever write: its longest text, and behind that a tree, in either model."""
        tree = sequence.tree
        if tree is None:
            return sequence.limit
        verified, draft = self._target.bucket(1 + tree.nodes), self.draft_executor
        return sequence.limit + max(verified, self._level_rows(draft, tree, [tree]) if draft else 0)

    def pick(self, sequence: Sequence, free: Seq[int]) -> int | None:
        """See `Loop.pick`: with a slot come its pages, and what they hold of the prompt already."""
        slot = super().pick(sequence, free)
        if slot is None or self._table is None:
            return slot
        pages, slots = self._table.pages, range(self._target.batch_size)
        usable = [pages.usable(slot, other, self._common(sequence, other)) for other in slots]
        source = max(slots, key=lambda other: (usable[other], other == slot))
        rows = usable[source]
        if not pages.take(slot, source, rows, self._rows(sequence)):
            return None
        self.admit(sequence, slot, source, rows)
        return slot

    def enter(self, sequences: Seq[Sequence]) -> None:
        """See `Loop.enter`."""
        if self._table:
            self._turn(sequence.slot for sequence in sequences)
        else:
            super().enter(sequences)

    def _turn(self, slots: Iterable[int]) -> None:
        """Bring the table to the device where it has changed, once nothing runs; a slot's new pages hold no NaN."""
        if self._table and self._table.stale:
            for executor in self._executors:
                executor.wait()
            for page in (page for slot in slots for page in self._table.pages.spoiled(slot)):
                self.erase(page)
            self._table.update(self._target.stream)

    def keep(self, slot: int, source: int, rows: int) -> None:
        """See `Loop.keep`."""
        super().keep(slot, source, rows)
        if self._model:
            self._model.keep(slot, source, rows)

    def kept(self, slot: int) -> int:
        """See `Loop.kept`: others may have got its last pages since."""
        return min(super().kept(slot), self._target.rows(slot))

    def erase(self, slot: int) -> None:
        """See `Loop.erase`: its rows may be no numbers. Of paged caches a page."""
        self._target.wait()  # which moves rows in both caches
        for executor in self._executors:
            executor.erase(slot)

    def logits(self, tokens: list[int], count: int = 1, nodes: int | None = None) -> NDArray[np.float32]:
        """See `Loop.logits`; several rows come from steps no longer than the largest bucket."""
        if self._table:
            self._fits(len(tokens), "give a shorter text, or load with more kv_cache_tokens")
            self._table.pages.take(0, 0, 0, len(tokens))
            self._turn([0])
        largest = self._target.model.buckets[-1]
        return super().logits(tokens, count, nodes if count == 1 else min(nodes or largest, largest))

    def release(self, slot: int) -> None:
        """See `Loop.release`."""
        super().release(slot)
        if self._table:
            last = self._last[slot]
            self._table.pages.release(slot, self.kept(slot), bool(last and last.error))
