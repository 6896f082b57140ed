"""Proposals: what each sequence drafts in a round on a device, as far as the host decides it."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from specbuild.runtime.decoding.planner import Planner
from specbuild.runtime.drafting.model import ModelDrafter
from specbuild.runtime.drafting.text_drafts import TextDrafts
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.tree import Tree, TreeSpec

from .room import Room
from .rounds import Draft


@dataclass(frozen=True, slots=True)
class Proposals:
    """Proposes the text's continuation, a tree of the model, or the root alone, within the limits and the caches' room.

    Attributes:
        planner: Selects the sequences that draft.
        room: Room in the caches.
        steps: Node counts that a step may have.
        texts: Drafts from the texts themselves.
        cached: By slot, how many tokens of its text the draft model has run; None: there is no model.
        for_all: Grows every tree on the host; None: the device grows them.
        for_constrained: Grows on the host the trees of sequences whose constraint is asked about each level; None:
            nothing does.
    """

    planner: Planner
    room: Room
    steps: Seq[int]
    texts: TextDrafts
    cached: Seq[int] | None
    for_all: ModelDrafter | None
    for_constrained: ModelDrafter | None

    def plan(self, sequences: Seq[Sequence]) -> list[Draft]:
        """Return each sequence's draft; trees that the host grows are not in it yet."""
        drafting = self.planner.drafting(sequences)
        shapes = {s.slot: s.shape for s in drafting if s.shape}
        # A tree from the text always has room: its nodes lie within the sequence's limit, and padding may lie beyond.
        roomy = [s for s in drafting if s.policy or self.room.fits(s, shapes[s.slot], [*shapes.values()])]
        trees = dict(zip((s.slot for s in roomy), self.texts.trees(roomy, self.cached), strict=True))
        return [self._draft(s, shapes, trees) for s in sequences]

    def _draft(self, sequence: Sequence, shapes: Mapping[int, TreeSpec], trees: Mapping[int, Tree | None]) -> Draft:
        """Return a sequence's draft: a tree from the text, of the model within its shape, or the root alone."""
        policy, lone, slot = sequence.policy, Tree([sequence.tokens[-1]]), sequence.slot
        if slot not in trees:
            return Draft(sequence, lone, drafts=slot in shapes)
        tree, shape = trees[slot], shapes[slot]
        drafter = self.for_constrained if sequence.sampler.matcher is not None else self.for_all
        if not tree and policy:
            shape = shape if drafter else policy.grown(shape, self.steps)
            if not self.room.fits(sequence, shape, [*shapes.values()]):
                policy.pass_over()
                tree = lone
        draft = Draft(sequence, tree, drafts=True, option=policy.now if policy else None)
        if not tree:
            draft.drafter, draft.spec = drafter, None if drafter else shape
        return draft

    @staticmethod
    def grow(plan: Seq[Draft]) -> None:
        """Grow the trees that the host grows; one drafter grows them all."""
        hosted = [draft for draft in plan if draft.drafter]
        if hosted and (drafter := hosted[0].drafter):
            trees = drafter.propose([draft.sequence for draft in hosted])
            for draft, tree in zip(hosted, trees, strict=True):
                draft.tree = tree
