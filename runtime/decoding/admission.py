"""Which sequence is in which slot, and what a slot's caches still hold for a text that begins the same."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from copy import copy

import numpy as np

from specbuild.runtime.backends.executor import Executor, share_rows
from specbuild.runtime.drafting.model import KeepsRows
from specbuild.runtime.requests.sequence import Sequence


class Admission:
    """The slots of a loop, whose rows are all there whoever has them; see `PagedAdmission` for pages."""

    page_tokens: int | None = None  # that all pages hold together; None: each slot has rows of its own

    def __init__(
        self, target: Executor, drafts: KeepsRows | None, prefix_caching: bool = True, generated: bool = True
    ) -> None:
        """`prefix_caching`: what a slot's cache holds of a text is there for the next one that begins the same.

        `generated`: what was decoded as well as what was read, whose bits need not be the same.
        """
        self._generated = generated
        self._target, self._drafts, self._prefix_caching = target, drafts, prefix_caching
        self._last: list[Sequence | None] = [None] * target.batch_size  # who was in each slot last

    def beside(self, drafts: KeepsRows | None) -> Admission:
        """The same slots for another loop over the same target, whose drafts are others."""
        other = copy(self)
        other._drafts = drafts
        return other

    def check(self, sequence: Sequence) -> None:
        """Raises OptionError for a sequence that would never get a slot."""

    def pick(self, sequence: Sequence, free: Seq[int]) -> int | None:
        """Of the free slots the one whose cache holds most of a sequence's prompt; the first of equals.

        None: it has to wait until others have ended.
        """
        return max(free, key=lambda slot: self.common(sequence, slot))

    def enter(self, sequences: Seq[Sequence]) -> None:
        """Of those new to their slots: what a prompt has in common with a text in any slot's cache is not read."""
        for sequence in sequences:
            if self._last[sequence.slot] is not sequence:
                self._enter(sequence, sequence.slot)

    def _enter(self, sequence: Sequence, slot: int) -> None:
        source = max(range(len(self._last)), key=lambda other: (self.common(sequence, other), other == slot))
        rows = self.common(sequence, source)
        self.vacate(slot)
        self._admit(sequence, slot, source, rows)

    def _admit(self, sequence: Sequence, slot: int, source: int, rows: int) -> None:
        """A slot is a sequence's, whose text begins with the first `rows` of what is, or was, in slot `source`."""
        share_rows(self._target, slot, source, rows)
        if self._drafts:
            self._drafts.keep(slot, source, rows)
        self._last[slot], sequence.cached, sequence.metrics.num_cached_tokens = sequence, rows, rows

    def common(self, sequence: Sequence, slot: int) -> int:
        """How many rows of a slot's cache a sequence can use; not its last token's, whose logits are wanted."""
        last, limit = self._last[slot], min(self.kept(slot), len(sequence.tokens) - 1)
        if not last or not limit or last.params.cache_salt != sequence.params.cache_salt:
            return 0
        differing = np.flatnonzero(last.history[:limit] != sequence.history[:limit])
        return int(differing[0]) if len(differing) else limit

    def vacate(self, slot: int) -> None:
        """Mark a slot empty; erase it if its last sequence failed."""
        last, self._last[slot] = self._last[slot], None
        if last and last.error:
            self._erase(slot)

    def _erase(self, slot: int) -> None:
        """Nothing that a failed sequence wrote may reach the next one, in either cache."""
        self._target.erase(slot)  # first: it moves rows of both
        if self._drafts and self._drafts.executor:
            self._drafts.executor.erase(slot)

    def borrow(self, slot: int, rows: int) -> None:
        """Take a free slot for a text of so many tokens that is no sequence's, until it is released."""
        self.vacate(slot)

    def release(self, slot: int) -> None:
        """A sequence has ended; its rows stay, for a text that begins the same."""
        self._target.commit(slot, (), self.kept(slot))
        if self._drafts:
            self._drafts.release(slot)

    def kept(self, slot: int) -> int:
        """Rows of a slot's cache that are of use to anybody."""
        last = self._last[slot]
        if not last or not self._prefix_caching or last.error:
            return 0
        return last.cached if self._generated else min(last.cached, last.metrics.num_prompt_tokens)

    def cached_tokens(self) -> tuple[int, ...]:
        """By slot, what `kept` says; from any thread."""
        return tuple(map(self.kept, range(len(self._last))))

    def cached_texts(self) -> list[tuple[str | None, list[int]]]:
        """The texts that the slots' caches hold: each one's `cache_salt` and tokens. From any thread."""
        held = [(last, last.history[: self.kept(slot)]) for slot, last in enumerate(self._last) if last]
        return [(last.params.cache_salt, rows.tolist()) for last, rows in held]
