"""Who drafts in a round and what came of it, on the host and on a device alike: limits, metrics and the policy."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from specbuild.runtime.errors import OptionError
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.draft_limits import NO_LIMITS, Limits


@dataclass(frozen=True, slots=True)
class Planner:
    """The operator's limits hold whatever requests ask for; `max_nodes`: of a sequence's part of a step."""

    limits: Limits = NO_LIMITS
    max_nodes: int = 1 << 16

    def check(self, sequence: Sequence) -> None:
        """Raises OptionError for a sequence that asks for a larger tree than is allowed."""
        max_nodes, tree = self.limits.max_draft_tokens, sequence.tree
        if max_nodes is not None and tree and tree.nodes > max_nodes and sequence.params.speculation != "auto":
            raise OptionError(
                f"tree {tree} drafts {tree.nodes} nodes, max_draft_tokens allows {max_nodes}: ask for fewer"
            )

    def drafting(self, sequences: Seq[Sequence]) -> list[Sequence]:
        """Who drafts in this round, their trees' shapes within the limits."""
        drafting = [sequence for sequence in sequences if sequence.drafts]
        for sequence in drafting:
            sequence.limit_tree(self.limits, len(drafting), self.max_nodes)
        return [sequence for sequence in drafting if sequence.shape]

    @staticmethod
    def record(
        sequence: Sequence,
        nodes: int,
        path: Seq[int],
        token: int,
        levels: int | None = None,
        unsettled: Seq[int] = (),
    ) -> None:
        """Note what came of a round that drafted.

        nodes: of the tree, the root not counted; path: the accepted ones, the root first; token: the first that was
        emitted; levels: of the tree below the root, where that is known; unsettled: the accepted node, if there is one,
        whose own choice was left to the next round.
        """
        told = sequence.metrics.speculative_decoding
        if nodes:
            told.record(nodes, len(path) - 1, levels)
            told.num_unsettled_steps += len(unsettled)
        if sequence.policy:
            sequence.policy.record(path, token)
            told.decide(sequence.policy.now.kind, sequence.policy.promised)
