"""Proposals: what each sequence drafts in a round on a device, as far as the host decides it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from specbuild.runtime.decoding.planner import Planner
from specbuild.runtime.drafting.proposer import ONE, Plan, Proposer
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.proposal import PLAIN, Proposal
from specbuild.runtime.speculation.tree import Tree, TreeSpec

from .room import Room


@dataclass(frozen=True, slots=True)
class Proposals:
    """Proposes the text's continuation, a tree of the model, or the root alone, within the limits and the caches' room.

    Attributes:
        planner: Limits what sequences draft.
        room: Room in the caches.
        steps: Node counts that a step may have.
        hosted: Whether the host grows all trees, not only those of constrained sequences.
    """

    planner: Planner
    room: Room
    steps: Seq[int]
    hosted: bool

    def plan(self, proposer: Proposer, sequences: Seq[Sequence]) -> list[tuple[Sequence, Proposal]]:
        """Return what each sequence drafts; trees that the host grows are grown."""
        drafting = self.planner.drafting(sequences)
        shapes = [s.shape for s in drafting if s.shape]
        # A tree from the text always has room: its nodes lie within the sequence's limit, and padding may lie beyond.
        roomy = [s for s in drafting if s.controller or (s.shape and self.room.fits(s, s.shape, shapes))]
        plan = proposer.plan(roomy, len(sequences), self.planner.now)
        proposer.grow(plan, self._trees(plan, shapes))
        proposals = {s.slot: proposal for s, proposal in zip(roomy, plan.proposals, strict=True)}
        return [(s, proposals.get(s.slot) or Proposal(Tree([s.tokens[-1]]))) for s in sequences]

    def _trees(self, plan: Plan, shapes: Seq[TreeSpec]) -> list[int]:
        """Fit a plan's trees to the device and the room, and return the indices of those that the host grows."""
        indices = list[int]()
        for index, (sequence, proposal) in enumerate(zip(plan.sequences, plan.proposals, strict=True)):
            if not (shape := proposal.shape):
                continue
            on_host = self.hosted or sequence.sampler.matcher is not None
            spec = shape if on_host else self._device_shape(proposal, shape)
            if not self.room.fits(sequence, spec, shapes):
                plan.proposals[index] = replace(proposal, shape=None, decision=proposal.decision and PLAIN)
            elif on_host:
                indices.append(index)
            else:
                chances = sequence.controller.chances.below(spec.depth) if sequence.controller else []
                plan.proposals[index] = replace(proposal, shape=spec, chances=[*chances, 0.0])
        return indices

    def _device_shape(self, proposal: Proposal, shape: TreeSpec) -> TreeSpec:
        """Return the shape of a tree that the device grows: as deep as decided, with all nodes of its step."""
        decision = proposal.decision
        if decision is None or shape is ONE:
            return shape
        depth = min(decision.levels, shape.depth)
        nodes = next((step for step in self.steps if step > decision.nodes), shape.nodes + 1) - 1
        return replace(shape, depth=depth, nodes=min(nodes, shape.nodes, shape.width * depth))
