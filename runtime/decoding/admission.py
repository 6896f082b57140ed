"""Admission: which sequence has which slot, and which cached rows of a common prefix it reuses."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from specbuild.runtime.backends.executor import Executor, share_rows
from specbuild.runtime.drafting.model import ModelDrafter
from specbuild.runtime.requests.sequence import Sequence


class Admission:
    """Assigns slots that each own all of their cache rows; `PagedAdmission` assigns slots of paged caches."""

    page_tokens: int | None = None  # tokens that all pages hold together; None: each slot has rows of its own

    def __init__(
        self, target: Executor, drafter: ModelDrafter | None, prefix_caching: bool = True, generated: bool = True
    ) -> None:
        """Start with empty slots.

        Args:
            target: Executor whose slots are assigned.
            drafter: Holds the draft's cache, which has the same slots; None: no model drafts.
            prefix_caching: Whether a new sequence reuses the cached rows of a text with the same prefix.
            generated: Whether it also reuses rows of decoded tokens, whose bits may differ from those of prefilled
                ones.
        """
        self._generated = generated
        self._target, self._drafter, self._prefix_caching = target, drafter, prefix_caching
        self._last: list[Sequence | None] = [None] * target.batch_size  # the last sequence of each slot

    def check(self, sequence: Sequence) -> None:
        """Raise OptionError for a sequence that could never get a slot."""

    def pick(self, sequence: Sequence, free: Seq[int]) -> int | None:
        """Return the free slot whose text the prompt continues most of, else an empty one, else the first of `free`.

        A prompt that shares only its beginning with a text (a system prompt) does not displace it: `enter` copies the
        rows. `free` has the slots by the time of their last use. None means that the sequence has to wait.
        """
        common = {slot: self.common(sequence, slot) for slot in free}
        texts = (slot for slot in free if common[slot] and self._continues(sequence, slot))
        empty = (slot for slot in free if not self.reusable(slot))
        return max(texts, key=common.__getitem__, default=next(empty, free[0]))

    def enter(self, sequences: Seq[Sequence]) -> None:
        """Set up the slots of new sequences; the longest prefix that any slot's cache holds is not prefilled again."""
        for sequence in sequences:
            if self._last[sequence.slot] is not sequence:
                self._enter(sequence, sequence.slot)

    def _enter(self, sequence: Sequence, slot: int) -> None:
        source = max(range(len(self._last)), key=lambda other: (self.common(sequence, other), other == slot))
        rows = self.common(sequence, source)
        self.vacate(slot)
        self._admit(sequence, slot, source, rows)

    def _admit(self, sequence: Sequence, slot: int, source: int, rows: int) -> None:
        """Give a slot to a sequence whose text begins with the first `rows` rows of slot `source`."""
        share_rows(self._target, slot, source, rows)
        if self._drafter:
            self._drafter.keep(slot, source, rows)
        self._last[slot] = sequence
        sequence.enter(rows)

    def common(self, sequence: Sequence, slot: int) -> int:
        """Return how many cached rows of a slot a sequence can reuse; not its last token's, whose logits are needed."""
        last, limit = self._last[slot], min(self.reusable(slot), len(sequence.tokens) - 1)
        if sequence.params.prompt_logprobs is not None:  # a cached row has no logits
            return 0
        if not last or not limit or last.params.cache_salt != sequence.params.cache_salt:
            return 0
        differing = np.flatnonzero(last.text.history[:limit] != sequence.text.history[:limit])
        return int(differing[0]) if len(differing) else limit

    def _continues(self, sequence: Sequence, slot: int) -> bool:
        """Return whether a prompt repeats every cached token of the last prompt of a slot that has rows in common."""
        last = self._last[slot]
        assert last is not None, "a slot of which rows are common has had a sequence"
        length = min(self.reusable(slot), last.metrics.num_prompt_tokens)
        return np.array_equal(sequence.text.history[:length], last.text.history[:length])

    def vacate(self, slot: int) -> None:
        """Mark a slot empty; erase it if its last sequence failed."""
        last, self._last[slot] = self._last[slot], None
        if last and last.error:
            self._erase(slot)

    def _erase(self, slot: int) -> None:
        """Erase a slot in both caches, so that nothing a failed sequence wrote reaches the next one."""
        self._target.erase(slot)  # first: the target's stream moves rows of both caches
        if self._drafter:
            self._drafter.executor.erase(slot)

    def borrow(self, slot: int, rows: int) -> None:
        """Reserve a free slot for a text of `rows` tokens that belongs to no sequence, until it is released."""
        self.vacate(slot)

    def release(self, slot: int) -> None:
        """Mark a slot's sequence as ended; its rows stay for a later text with the same prefix."""
        self._target.commit(slot, (), self.reusable(slot))
        if self._drafter:
            self._drafter.release(slot)

    def reusable(self, slot: int) -> int:
        """Return how many rows of a slot's cache later sequences may reuse."""
        last = self._last[slot]
        if not last or not self._prefix_caching or last.error:
            return 0
        return last.cached if self._generated else min(last.cached, last.metrics.num_prompt_tokens)

    def cached_tokens(self) -> tuple[int, ...]:
        """Return `reusable` of every slot; any thread may call this."""
        return tuple(map(self.reusable, range(len(self._last))))

    def cached_texts(self) -> list[tuple[str | None, list[int]]]:
        """Return the `cache_salt` and tokens of each text in the slots' caches; any thread may call this."""
        texts = [(last, last.text.history[: self.reusable(slot)]) for slot, last in enumerate(self._last) if last]
        return [(last.params.cache_salt, rows.tolist()) for last, rows in texts]
