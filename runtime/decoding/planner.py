"""Who drafts in a round and what came of it, on the host and on a device alike: limits, metrics and the policy."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from specbuild.runtime.errors import OptionError
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.draft_limits import NO_LIMITS, Limits


@dataclass(slots=True)
class Planner:
    """The operator's limits hold whatever requests ask for; `max_nodes`: of a sequence's part of a step.

    `now`: the limits of the rounds to come, any thread's to set; those it was made with decide what is refused.
    """

    limits: Limits = NO_LIMITS
    max_nodes: int = 1 << 16
    now: Limits = field(init=False)

    def __post_init__(self) -> None:
        self.now = self.limits

    def limit(self, limits: Limits) -> None:
        """From the next round on; raises OptionError for more nodes than it was made for, which steps may lack."""
        most, asked = self.limits.max_draft_tokens, limits.max_draft_tokens
        if most is not None and asked is not None and asked > most:
            raise OptionError(f"max_draft_tokens {asked} is more than {most}, what the engine was loaded with")
        self.now = limits if asked is not None else replace(limits, max_draft_tokens=most)

    def check(self, sequence: Sequence) -> None:
        """Raises OptionError for a sequence that asks for a larger tree than is allowed."""
        max_nodes, tree = self.limits.max_draft_tokens, sequence.tree
        if max_nodes is not None and tree and tree.nodes > max_nodes and sequence.params.speculation != "auto":
            raise OptionError(
                f"tree {tree} drafts {tree.nodes} nodes, max_draft_tokens allows {max_nodes}: ask for fewer"
            )

    def drafting(self, sequences: Seq[Sequence]) -> list[Sequence]:
        """Who drafts in this round, their trees' shapes within the limits."""
        drafting, now = [sequence for sequence in sequences if sequence.drafts], self.now
        for sequence in drafting:
            sequence.limit_tree(now, len(drafting), self.max_nodes)
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
