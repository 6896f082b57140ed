"""Room: whether the caches have rows left for a tree."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from specbuild.runtime.backends.gpu.executor import StandardExecutor
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.tree import TreeSpec


class Room:
    """Rows in the caches of the target and of the draft whose trees it verifies, if there is one."""

    def __init__(self, target: StandardExecutor, draft: StandardExecutor | None) -> None:
        self._target, self._draft = target, draft
        self._max_positions = min(each.spec.max_positions for each in (target, draft) if each)

    def fits(self, sequence: Sequence, spec: TreeSpec, others: Seq[TreeSpec]) -> bool:
        """Return whether a sequence's tree fits when it is drafted with `others`, which include its own."""
        return spec.nodes <= self.positions(sequence) and self.free_rows(sequence, spec, others) >= 0

    def positions(self, sequence: Sequence) -> int:
        """Return how many tokens more the models have positions for."""
        return self._max_positions - len(sequence.tokens)

    def free_rows(self, sequence: Sequence, spec: TreeSpec, others: Seq[TreeSpec]) -> int:
        """Return how many rows a sequence's tree leaves in the draft's cache; negative if it lacks room.

        Levels run in steps for the widest of `others`.
        """
        draft = self._draft
        if draft is None:
            return 0
        if spec.expand * (spec.depth - 1) > draft.max_rows:
            return -1
        return draft.rows(sequence.slot) - self._level_rows(draft, spec, others) - len(sequence.tokens)

    @staticmethod
    def _level_rows(draft: StandardExecutor, shape: TreeSpec, specs: Seq[TreeSpec]) -> int:
        """Return how many rows behind the root's a tree takes in the draft's cache."""
        return shape.expand * max(shape.depth - 2, 0) + draft.bucket(max(spec.expand for spec in specs))

    def needed(self, sequence: Sequence) -> int:
        """Return how many rows a sequence may ever write in either model: its longest text, and a tree behind it."""
        tree, longest = sequence.request.tree, sequence.request.max_tokens
        if tree is None:
            return longest
        verified = self._target.bucket(1 + tree.nodes)
        return longest + max(verified, self._level_rows(self._draft, tree, [tree]) if self._draft else 0)
