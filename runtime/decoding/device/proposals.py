"""Proposals: what each sequence drafts in a round on a device, as far as the host decides it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from specbuild.runtime.decoding.planner import Planner
from specbuild.runtime.drafting.proposer import ONE, Plan, Proposer
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.controller import PLAIN, Proposal
from specbuild.runtime.speculation.tree import Tree, TreeSpec

from .room import Room
from .rounds import Draft


@dataclass(frozen=True, slots=True)
class Proposals:
    """Proposes the text's continuation, a tree of the model, or the root alone, within the limits and the caches' room.

    Attributes:
        planner: Limits what sequences draft.
        room: Room in the caches.
        steps: Node counts that a step may have.
        proposer: Decides; its model grows trees on the host, those of constrained sequences or all.
        hosted: Whether it grows all of them.
    """

    planner: Planner
    room: Room
    steps: Seq[int]
    proposer: Proposer
    hosted: bool

    def plan(self, sequences: Seq[Sequence]) -> list[Draft]:
        """Return each sequence's draft; trees that the host grows are grown."""
        drafting = self.planner.drafting(sequences)
        shapes = [s.shape for s in drafting if s.shape]
        # A tree from the text always has room: its nodes lie within the sequence's limit, and padding may lie beyond.
        roomy = [s for s in drafting if s.controller or (s.shape and self.room.fits(s, s.shape, shapes))]
        plan = self.proposer.plan(roomy, len(sequences), self.planner.now)
        specs = self._of_device(plan, shapes)
        self.proposer.grow(plan)
        proposals = {s.slot: proposal for s, proposal in zip(roomy, plan.proposals, strict=True)}
        return [self._draft(s, proposals.get(s.slot), specs.get(s.slot)) for s in sequences]

    def _of_device(self, plan: Plan, shapes: Seq[TreeSpec]) -> dict[int, TreeSpec]:
        """Leave to the host the trees that it grows and that have room; return the shapes of the others, by slot."""
        specs = dict[int, TreeSpec]()
        for number, shape in list(plan.shapes.items()):
            sequence, proposal = plan.sequences[number], plan.proposals[number]
            on_host = self.hosted or sequence.sampler.matcher is not None
            spec = shape if on_host else self._grown(proposal, shape)
            fits = self.room.fits(sequence, spec, shapes)
            if fits and on_host:
                continue
            del plan.shapes[number]
            if fits:
                specs[sequence.slot] = spec
                chances = sequence.controller.chances.below(spec.depth) if sequence.controller else []
                proposal.chances = [*chances, 0.0]
            elif proposal.decision:
                proposal.decision = PLAIN
        return specs

    def _draft(self, sequence: Sequence, proposal: Proposal | None, spec: TreeSpec | None) -> Draft:
        """Return a sequence's draft, the root alone where nothing was proposed."""
        proposal = proposal or Proposal(Tree([sequence.tokens[-1]]))
        return Draft(sequence, proposal, spec, drafts=sequence.budget is not None)

    def _grown(self, proposal: Proposal, shape: TreeSpec) -> TreeSpec:
        """Return the shape of a tree that the device grows: as deep as decided, with all nodes of its step."""
        decision = proposal.decision
        if decision is None or shape is ONE:
            return shape
        depth = min(decision.levels, shape.depth)
        nodes = next((step for step in self.steps if step > decision.nodes), shape.nodes + 1) - 1
        return replace(shape, depth=depth, nodes=min(nodes, shape.nodes, shape.width * depth))

    def record(self, draft: Draft, path: Seq[int], token: int, drafted: int) -> None:
        """Record what became of a draft.

        Args:
            draft: The draft.
            path: The accepted nodes, the root first; of a tree that the device grew only their number counts.
            token: The first emitted token.
            drafted: Nodes that were drafted.
        """
        if draft.drafts:
            known = draft.spec is None
            levels = max(draft.proposal.tree.depths) if known else None
            nodes = path if known else range(len(path))
            self.planner.record(draft.sequence, draft.proposal, nodes, token, drafted, levels)
