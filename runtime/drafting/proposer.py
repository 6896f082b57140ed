"""Proposes every round's trees: what constraints force, what texts repeat, and what the draft model grows.

A loop, a quotation or an edit is continued from the text at no cost, and deeper than a model's tree would go. Where a
request leaves speculation to its controller, all sequences of a round are decided together.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from specbuild.runtime.backends.executor import Executor
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.controller import PLAIN, Decision, Proposal, Round, SequenceController
from specbuild.runtime.speculation.draft_limits import NO_LIMITS, Limits
from specbuild.runtime.speculation.goodput import Candidate
from specbuild.runtime.speculation.tree import Tree, TreeSpec

from .lookup import SURE, SURE_GREEDY, continuation, longest, lookup, repeats
from .model import ModelDrafter

ONE = TreeSpec.parse("chain:1")


@dataclass(slots=True)
class Plan:
    """A round's proposals, and which of them the draft model has to grow.

    Attributes:
        sequences: The sequences that draft.
        proposals: Theirs, in order; the root alone where a tree is still to be grown.
        shapes: By the number of a sequence, the shape of the tree to grow for it.
        round: The decisions; None if no controller was asked.
        numbers: By the number of a sequence, its number in `round`.
    """

    sequences: Seq[Sequence]
    proposals: list[Proposal]
    shapes: dict[int, TreeSpec] = field(default_factory=dict)
    round: Round | None = None
    numbers: dict[int, int] = field(default_factory=dict)


class Proposer:
    """Drafts from texts, and with a model if there is one; holds the draft's cache."""

    def __init__(
        self, model: ModelDrafter | None = None, looks_up: bool = True, cached: Seq[int] | None = None
    ) -> None:
        """Make a proposer.

        Args:
            model: Grows trees on the host; None: nothing does.
            looks_up: Whether texts are continued from themselves; False leaves drafting to the model.
            cached: By slot, how many tokens of its text a model on the device has run; None: there is none.
        """
        self.model, self.looks_up = model, looks_up
        self._cached = model.cached if model else cached
        self.grown: set[int] = set()  # slots whose last tree the model grew

    @property
    def executor(self) -> Executor | None:
        """The executor of the draft model; None if no model drafts on the host."""
        return self.model.executor if self.model else None

    def propose(self, sequences: Seq[Sequence], step: int = 0, limits: Limits = NO_LIMITS) -> list[Proposal]:
        """Return a proposal for each sequence; see `plan`."""
        plan = self.plan(sequences, step, limits)
        self.grow(plan)
        return plan.proposals

    def plan(self, sequences: Seq[Sequence], step: int = 0, limits: Limits = NO_LIMITS) -> Plan:
        """Decide what each sequence drafts.

        Args:
            sequences: The sequences that draft.
            step: Sequences in the round's step, those that only decode or prefill included; 0: these alone.
            limits: The operator's limits.
        """
        plan = Plan(sequences, [Proposal(Tree([s.tokens[-1]])) for s in sequences])
        controllers, open_ = list[tuple[SequenceController, Candidate]](), list[tuple[int, int]]()
        for number, sequence in enumerate(sequences):
            if not sequence.shape:
                continue
            if forced := self._forced(sequence):
                plan.proposals[number] = forced
            elif sequence.controller is None:
                self._of_shape(plan, number, sequence, sequence.shape)
            else:
                start, matched = self._continuation(sequence)
                unread = len(sequence.tokens) - 1 - self._cached[sequence.slot] if self._cached is not None else 0
                plan.numbers[number] = len(controllers)
                controllers.append((sequence.controller, sequence.controller.candidate(matched, sequence.room, unread)))
                open_.append((start, matched))
        if controllers:
            sampled = any(controller.sampled for controller, _ in controllers)
            cost = controllers[0][0].engine.cost.of_round(max(step, len(sequences)), sampled)
            plan.round = Round(controllers, cost, limits)
            for number, at in plan.numbers.items():
                self._decided(plan, number, *open_[at], plan.round.decisions[at])
        return plan

    def grow(self, plan: Plan) -> None:
        """Grow the trees that a plan leaves to the model on the host, and cut them to what is worth verifying."""
        self.grown = {plan.sequences[number].slot for number in plan.shapes}
        if not (self.model and plan.shapes):
            return
        asked = []
        for number, shape in plan.shapes.items():
            decided = plan.round is not None and number in plan.numbers
            rule = plan.round.rule(plan.numbers[number]) if plan.round and decided else None
            asked.append((plan.sequences[number], shape, rule))
        trees = dict(zip(plan.shapes, self.model.grow(asked), strict=True))
        counts = dict[int, int]()
        if plan.round:
            counts = plan.round.cut({plan.numbers[n]: tree for n, tree in trees.items() if n in plan.numbers})
        for number, growth in trees.items():
            proposal, count = plan.proposals[number], counts.get(plan.numbers.get(number, -1))
            proposal.tree = growth.tree(count)
            if proposal.decision:
                proposal.chances = growth.chances()

    def commit(self, sequence: Sequence, path: Seq[int]) -> None:
        """Note the accepted nodes of the tree just proposed; `path`: the nodes, the root first."""
        if self.model and sequence.slot in self.grown:
            self.model.commit(sequence, path)

    def keep(self, slot: int, source: int, rows: int) -> None:
        """See `KeepsRows.keep`; only the model has rows."""
        if self.model:
            self.model.keep(slot, source, rows)

    def release(self, slot: int) -> None:
        """See `KeepsRows.release`."""
        if self.model:
            self.model.release(slot)

    def close(self) -> None:
        """Free the draft model."""
        if self.model:
            self.model.close()

    def _forced(self, sequence: Sequence) -> Proposal | None:
        """Return the tokens about which the constraint leaves no choice, as a chain, or None."""
        if not sequence.sampler.foresees or not sequence.shape:
            return None
        found = sequence.sampler.follow((), (), min(sequence.shape.nodes, sequence.room))
        decision = Decision("forced", len(found)) if sequence.controller else None
        return Proposal(Tree.chain([sequence.tokens[-1], *found]), decision) if found else None

    def _of_shape(self, plan: Plan, number: int, sequence: Sequence, shape: TreeSpec) -> None:
        """Plan a tree of the shape that a request names: from the text where it repeats itself, else of the model."""
        if self._cached is None:
            tree: Tree | None = lookup(sequence.tokens, sequence.string, shape)
        else:
            sure = SURE if sequence.params.temperature else SURE_GREEDY
            tree = repeats(sequence.tokens, sequence.string, shape, sure) if self.looks_up else None
        if tree is None:
            plan.shapes[number] = shape
        else:
            plan.proposals[number].tree = constrained(sequence, tree, shape.nodes)

    def _continuation(self, sequence: Sequence) -> tuple[int, int]:
        """Return where the text's continuation begins and how many tokens before it match, unless it is forbidden."""
        start, matched = longest(sequence.string) if self.looks_up else (0, 0)
        if matched and sequence.sampler.foresees:
            first = [sequence.tokens[start]]
            if sequence.sampler.follow((), first, 1) != first:
                return 0, 0
        return start, matched

    def _decided(self, plan: Plan, number: int, start: int, matched: int, decision: Decision) -> None:
        """Put a decision into the plan."""
        sequence, proposal = plan.sequences[number], plan.proposals[number]
        controller, shape = sequence.controller, sequence.shape
        assert controller
        assert shape
        proposal.decision = decision
        if matched:
            proposal.guess = sequence.tokens[start], controller.chances.continuation(matched, 1)[0]
        if decision.kind == "lookup":
            tokens = continuation(sequence.tokens, start, decision.nodes)
            proposal.tree = constrained(sequence, Tree.chain([sequence.tokens[-1], *tokens]), sequence.room)
            same = _common(tokens, proposal.tree.tokens[1:])
            chances = controller.chances.continuation(matched, same)
            proposal.chances = [*chances, *[0.0] * (len(proposal.tree) - same)]
        elif decision is not PLAIN:
            plan.shapes[number] = ONE if decision.kind == "probe" else shape


def constrained(sequence: Sequence, tree: Tree, nodes: int) -> Tree:
    """Return a tree without what its constraint forbids, each branch extended by forced tokens, up to `nodes`."""
    if not sequence.sampler.foresees or len(tree) == 1:
        return tree
    grown, children = Tree(tree.tokens[:1]), dict[tuple[int, int], int]()
    limit, inner = max(nodes, len(tree) - 1), {*tree.parents}
    for leaf in (node for node in range(len(tree)) if node not in inner):
        node = 0
        for token in sequence.sampler.follow((), tree.path(leaf), limit):
            if (node, token) not in children:
                if len(grown) > limit:
                    break
                children[node, token] = grown.add(token, node)
            node = children[node, token]
    return grown


def _common(one: Seq[int], other: Seq[int]) -> int:
    """Return how many first tokens two chains share."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
