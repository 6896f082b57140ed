"""Proposals: what each sequence drafts in a round on a device, as far as the host decides it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from specbuild.runtime.decoding.planner import Planner
from specbuild.runtime.drafting.proposer import ONE, Proposer
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
        on_host: Whether the host grows all trees, not only those of constrained sequences.
    """

    planner: Planner
    room: Room
    steps: Seq[int]
    on_host: bool

    def plan(self, proposer: Proposer, sequences: Seq[Sequence]) -> list[tuple[Sequence, Proposal]]:
        """Return what each sequence drafts; trees that the host grows are grown."""
        drafting = self.planner.drafting(sequences)
        shapes = [s.shape for s in drafting if s.shape]
        # A tree from the text always has room: its nodes lie within the sequence's limit, and padding may lie beyond.
        roomy = [s for s in drafting if s.controller or (s.shape and self.room.fits(s, s.shape, shapes))]
        plan = proposer.plan(roomy, len(sequences), self.planner.current)
        plan = replace(plan, proposals=[self._fit(*each, shapes) for each in zip(roomy, plan.proposals, strict=True)])
        drafts = proposer.grow(plan, [index for index, sequence in enumerate(roomy) if self._grows_on_host(sequence)])
        proposals = {s.slot: proposal for s, proposal in zip(roomy, drafts, strict=True)}
        return [(s, proposals.get(s.slot) or Proposal(Tree([s.tokens[-1]]))) for s in sequences]

    def _grows_on_host(self, sequence: Sequence) -> bool:
        """Return whether the host grows a sequence's trees."""
        return self.on_host or sequence.sampler.matcher is not None

    def _fit(self, sequence: Sequence, proposal: Proposal, shapes: Seq[TreeSpec]) -> Proposal:
        """Return a proposal whose tree has room, in the shape in which the device grows it unless the host does."""
        if not proposal.shape:
            return proposal
        on_host = self._grows_on_host(sequence)
        shape = proposal.shape if on_host else self._device_shape(proposal, proposal.shape)
        if not self.room.fits(sequence, shape, shapes):
            return replace(proposal, shape=None, decision=proposal.decision and PLAIN)
        if on_host:
            return proposal
        chances = sequence.controller.chances.below(shape.depth) if sequence.controller else []
        return replace(proposal, shape=shape, chances=[*chances, 0.0])

    def _device_shape(self, proposal: Proposal, shape: TreeSpec) -> TreeSpec:
        """Return the shape of a tree that the device grows: as deep as decided, with all nodes of its step."""
        decision = proposal.decision
        if decision is None or shape is ONE:
            return shape
        depth = min(decision.levels, shape.depth)
        nodes = next((step for step in self.steps if step > decision.nodes), shape.nodes + 1) - 1
        return replace(shape, depth=depth, nodes=min(nodes, shape.nodes, shape.width * depth))
