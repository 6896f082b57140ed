"""Plans which sequences draft in a round and records the results, for both loops: limits, metrics and the policy."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from specbuild.runtime.errors import OptionError
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.draft_limits import NO_LIMITS, Limits


@dataclass(slots=True)
class Planner:
    """Applies the operator's limits, whatever requests ask for. `max_nodes`: a sequence's maximum nodes in a step.

    `rests`: whether sequences rest from deciding; where a device continues texts they decide once in many rounds.
    `on_host`: whether a host decodes. Then a sequence that decodes alone never rests if its step has a free row, which
    costs nothing, and the drafts of some hardly slow the others.
    `now`: the limits of the next rounds, which any thread may set. Requests are refused by `limits`, the initial ones.
    """

    limits: Limits = NO_LIMITS
    max_nodes: int = 1 << 16
    on_host: bool = True
    rests: bool = True
    now: Limits = field(init=False)

    def __post_init__(self) -> None:
        self.now = self.limits

    def limit(self, limits: Limits) -> None:
        """Set the limits of the next rounds; raises OptionError for more nodes than at first: steps may lack room."""
        loaded, asked = self.limits.max_draft_tokens, limits.max_draft_tokens
        if loaded is not None and asked is not None and asked > loaded:
            raise OptionError(f"max_draft_tokens {asked} is more than {loaded}, what the engine was loaded with")
        self.now = limits if asked is not None else replace(limits, max_draft_tokens=loaded)

    def check(self, sequence: Sequence) -> None:
        """Raise OptionError for a sequence that asks for a larger tree than is allowed."""
        limit, tree = self.limits.max_draft_tokens, sequence.tree
        if limit is not None and tree and tree.nodes > limit and sequence.params.speculation != "auto":
            raise OptionError(f"tree {tree} drafts {tree.nodes} nodes, max_draft_tokens allows {limit}: ask for fewer")

    def drafting(self, sequences: Seq[Sequence]) -> list[Sequence]:
        """Return the sequences that draft in this round, with the shapes of their trees limited.

        On a host several sequences wait with deciding, which slows all of them, until each is ahead of plain decoding
        by what that costs.
        """
        drafting, alone = [sequence for sequence in sequences if sequence.drafts], self.on_host and len(sequences) == 1
        several, now = self.on_host and not alone and drafting, self.now
        lead = min(s.lead for s in sequences if s.decodes) if several else math.inf
        for sequence in sequences:
            sequence.shape = None
        for sequence in drafting:
            policy = sequence.policy
            rests = policy and self.rests and not (sequence.sampler.foresees or (alone and policy.free))
            if policy and rests and policy.rest.dozes(spares=lead < policy.rest.waits.cost):
                sequence.metrics.speculative_decoding.decide("plain")
            else:
                sequence.limit_tree(now, len(drafting), self.max_nodes)
        drafting = [sequence for sequence in drafting if sequence.shape]
        plain = min((s.lead for s in sequences if drafting and several and s.decodes and not s.shape), default=math.inf)
        for sequence, policy in ((s, s.policy) for s in drafting if s.policy):
            policy.together, policy.leads = len(sequences), (sequence.lead if self.on_host else math.inf, plain)
        return drafting

    @staticmethod
    def record(sequence: Sequence, nodes: int, path: Seq[int], token: int, levels: int | None = None) -> None:
        """Record the result of a round in a sequence's metrics and policy.

        Args:
            sequence: A sequence that was to draft.
            nodes: Nodes of its tree, the root not counted.
            path: The accepted nodes, the root first.
            token: The first emitted token.
            levels: Levels of the tree below the root; None: not known.
        """
        told = sequence.metrics.speculative_decoding
        if nodes:
            told.record(nodes, len(path) - 1, levels)
        if sequence.policy:
            sequence.policy.record(path, token)
            told.decide(sequence.policy.now.kind, sequence.policy.promised)
