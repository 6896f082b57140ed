"""Proposals: what each sequence drafts in a round on a device, as far as the host decides it."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from specbuild.runtime.decoding.planner import Planner
from specbuild.runtime.drafting.model import ModelDrafter
from specbuild.runtime.drafting.text_drafts import TextDrafts
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.depth import Depths
from specbuild.runtime.speculation.option import PLAIN
from specbuild.runtime.speculation.policy import LONGEST
from specbuild.runtime.speculation.tree import Tree, TreeSpec

from .room import Room
from .rounds import Draft, Entries


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
        depths: How far a device continues texts by itself, greedy and sampled ones.
    """

    planner: Planner
    room: Room
    steps: Seq[int]
    texts: TextDrafts
    cached: Seq[int] | None
    for_all: ModelDrafter | None
    for_constrained: ModelDrafter | None
    depths: tuple[Depths, Depths] = field(default_factory=lambda: (Depths(), Depths()))

    def plan(self, sequences: Seq[Sequence], continued: int = 0, hidden: bool = False) -> list[Draft]:
        """Return each sequence's draft; trees that the host grows are not in it yet.

        Args:
            sequences: The sequences of the round.
            continued: Tokens of each text that the device would draft by itself at most, if nothing else is drafted.
            hidden: Whether the device is busy meanwhile, so that deciding costs nothing.
        """
        brought = self.depths_of(sequences).best(len(sequences), continued) if continued else 0.0
        for policy in (s.policy for s in sequences if s.policy):
            policy.brought = brought
        drafting = self.planner.drafting(sequences)
        shapes = {s.slot: s.shape for s in drafting if s.shape}
        # A tree from the text always has room: its nodes lie within the sequence's limit, and padding may lie beyond.
        roomy = [s for s in drafting if s.policy or self.room.fits(s, shapes[s.slot], [*shapes.values()])]
        trees = dict(zip((s.slot for s in roomy), self.texts.trees(roomy, self.cached), strict=True))
        for policy in (s.policy for s in roomy if hidden and s.policy):
            policy.rest.took = 0.0
        return [self._draft(s, shapes, trees) for s in sequences]

    def longest(self, sequences: Seq[Sequence]) -> int:
        """Return how many tokens of its text's continuation a device may draft for each of these sequences by itself.

        None of a request that needs the host or asks for a tree of its own, nor beside one; and none where a round has
        to promise more than plain decoding.
        """
        now = self.planner.now
        if not self.texts.looks_up or now.min_expected_speedup > 1 or any(s.needs_host for s in sequences):
            return 0
        drafting = [s for s in sequences if s.tree is not None]
        return now.max_nodes(len(drafting), LONGEST) if drafting and all(s.policy for s in drafting) else 0

    def depths_of(self, sequences: Seq[Sequence]) -> Depths:
        """Return how far texts are continued: sampled ones apart, as soon as one is sampled."""
        return self.depths[any(s.params.temperature > 0 for s in sequences)]

    def bound(self, sequences: Seq[Sequence], limit: int) -> tuple[int, int | None]:
        """Return how many tokens of texts to continue, and in how many rounds; see `Depths.choose`."""
        return self.depths_of(sequences).choose(len(sequences), limit)

    def timed(self, bound: int | None, entries: Entries, seconds: float | None) -> None:
        """Record a round in which a device continued texts; see `Flights.bound` and `Depths.record`."""
        if bound is not None:
            accepted = [len(emitted) - 1 for draft, _, _, emitted in entries if draft.continued]
            self.depths_of([draft.sequence for draft, *_ in entries]).record(bound, accepted, seconds, len(entries))

    @staticmethod
    def again(drafts: list[Draft]) -> list[Draft]:
        """Return the drafts, for which nothing was to decide: of their next round nothing is learnt."""
        for policy in (draft.sequence.policy for draft in drafts):
            if policy:
                policy.resume(PLAIN)
        return drafts

    def record(self, draft: Draft, path: Seq[int], token: int, drafted: int) -> None:
        """Record what became of a draft.

        Args:
            draft: The draft.
            path: The accepted nodes, the root first; of a tree that the device grew only their number counts.
            token: The first emitted token.
            drafted: Nodes that were drafted.
        """
        sequence, policy, known, levels = draft.sequence, draft.sequence.policy, draft.tree, None
        if draft.continued:
            known, levels = None, drafted
        elif known:
            levels = max(known.depths)
        if draft.drafts:
            if policy and draft.continued:
                policy.was_continued(drafted)
            self.planner.record(sequence, drafted, path if known else range(len(path)), token, levels)
            self.texts.learn(sequence, len(path))
            return
        if drafted and draft.continued:
            sequence.metrics.speculative_decoding.record(drafted, len(path) - 1, levels)
        if policy and policy.rest.due:
            self.texts.reflect(sequence, policy.rest)

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
