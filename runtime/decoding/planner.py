"""Applies the operator's limits to what sequences draft, for both loops, and records what became of their drafts."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from specbuild.runtime.errors import OptionError
from specbuild.runtime.requests.sequence import DraftBudget, Sequence
from specbuild.runtime.speculation.draft_limits import NO_LIMITS, Limits

from .round_result import RoundResult


@dataclass(slots=True)
class Planner:
    """The operator's limits, whatever requests ask for. `max_nodes`: a sequence's maximum nodes in a step.

    `current`: those of the next rounds, which any thread may set. Requests are refused by `limits`, the first ones.
    """

    limits: Limits = NO_LIMITS
    max_nodes: int = 1 << 16
    current: Limits = field(init=False)

    def __post_init__(self) -> None:
        self.current = self.limits

    def limit(self, limits: Limits) -> None:
        """Set the limits of the next rounds; raises OptionError for more nodes than at first: steps may lack room."""
        most, nodes = self.limits.max_draft_tokens, limits.max_draft_tokens
        if most is not None and nodes is not None and nodes > most:
            raise OptionError(f"max_draft_tokens {nodes} is more than {most}, what the engine was loaded with")
        self.current = limits if nodes is not None else replace(limits, max_draft_tokens=most)

    def check(self, sequence: Sequence) -> None:
        """Raise OptionError for a sequence that asks for a larger tree than is allowed."""
        limit, tree = self.limits.max_draft_tokens, sequence.request.tree
        if limit is not None and tree and tree.nodes > limit and sequence.params.speculation != "auto":
            raise OptionError(f"tree {tree} drafts {tree.nodes} nodes, max_draft_tokens allows {limit}: ask for fewer")

    def drafting(self, sequences: Seq[Sequence]) -> list[Sequence]:
        """Return the sequences that may draft in this round, and set all budgets."""
        drafts = [sequence.drafts for sequence in sequences]
        for sequence, each in zip(sequences, drafts, strict=True):
            sequence.set_budget(self._budget(sequence, sum(drafts)) if each else None)
        return [sequence for sequence in sequences if sequence.budget]

    def _budget(self, sequence: Sequence, batch: int) -> DraftBudget | None:
        """Return what a sequence may draft in a round in which `batch` sequences draft, this one included."""
        tree, most = sequence.request.tree, self.max_nodes - 1
        shape = tree and tree.within(self.current.max_nodes(batch, min(most, tree.nodes)))
        missing = sequence.request.max_tokens - len(sequence.tokens) - 1
        return DraftBudget(self.current.max_nodes(batch, min(most, missing)), shape) if shape else None

    @staticmethod
    def record(result: RoundResult) -> None:
        """Record what became of a proposal in the sequence's metrics and its controller."""
        sequence, proposal, path = result.sequence, result.proposal, result.path
        counts, depth = sequence.metrics.speculative_decoding, None
        if proposal.shape:  # of a tree that a device grew only the path's length is known
            path = range(len(path))
        else:
            depth = max(proposal.tree.depths)
        if result.drafted:
            counts.record(result.drafted, len(path) - 1, depth)
        if sequence.controller and (decision := proposal.decision):
            ended = sequence.finish_reason is not None
            sequence.controller.record(proposal, path, result.tokens[0], ended=ended)
            counts.decide(decision.kind, decision.speedup)
