"""Proposes every round's trees: what constraints force, predictions and texts go on with, and what the model grows.

A loop, a quotation or an edit is continued at no cost, and deeper than a model's tree would go. Where a
request leaves speculation to its controller, all sequences of a round are decided together.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from specbuild.runtime.backends.executor import Executor
from specbuild.runtime.requests.prediction import CERTAIN
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.requests.token_string import MAX_MATCH
from specbuild.runtime.speculation.controller import MAX_CONTINUATION, Decision, Guess, Proposal, Round
from specbuild.runtime.speculation.draft_limits import NO_LIMITS, Limits
from specbuild.runtime.speculation.goodput import Candidate
from specbuild.runtime.speculation.sessions import TextDrafter
from specbuild.runtime.speculation.tree import Tree, TreeSpec

from .lookup import continuation, longest
from .model import ModelDrafter

ONE = TreeSpec.parse("chain:1")


@dataclass(frozen=True, slots=True)
class Continuation:
    """Tokens that may follow a text, where they come from, and how many tokens before them match; 0: there are none."""

    drafter: TextDrafter
    matched: int
    tokens: Seq[int]


NO_CONTINUATION = Continuation("lookup", 0, ())


@dataclass(slots=True)
class Plan:
    """A round's proposals, and which of them the draft model has to grow.

    Attributes:
        sequences: The sequences that draft.
        proposals: Theirs, in order; the root alone where a tree is still to be grown.
        shapes: By the index of a sequence, the shape of the tree to grow for it.
        decided: Indices of the sequences that `round` decides, in its order.
        round: The decisions; None if no controller was asked.
    """

    sequences: Seq[Sequence]
    proposals: list[Proposal]
    shapes: dict[int, TreeSpec] = field(default_factory=dict)
    decided: list[int] = field(default_factory=list)
    round: Round | None = None


class Proposer:
    """Drafts from texts, and with a model if there is one; holds the draft's cache."""

    def __init__(self, model: ModelDrafter | None = None, looks_up: bool = True) -> None:
        """Make a proposer.

        Args:
            model: Grows trees on the host; None: nothing does.
            looks_up: Whether texts are continued from themselves; False leaves drafting to the model.
        """
        self.model, self.looks_up = model, looks_up

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
        plan, candidates = Plan(sequences, [Proposal(Tree([s.tokens[-1]])) for s in sequences]), list[Candidate]()
        continuations = list[Continuation]()
        for index, sequence in enumerate(sequences):
            if not (budget := sequence.budget):
                continue
            if forced := self._forced(sequence):
                plan.proposals[index] = forced
            elif sequence.controller is None:
                self._of_shape(plan, index, sequence, budget.shape)
            else:
                known = self._continuation(sequence, min(budget.nodes, MAX_CONTINUATION))
                unread = len(sequence.tokens) - 1 - self.model.cached[sequence.slot] if self.model else 0
                plan.decided.append(index)
                continuations.append(known)
                candidates.append(
                    sequence.controller.candidate(
                        known.drafter, known.matched, budget.nodes, budget.shape, max(unread, 0)
                    )
                )
        if controllers := [each for index in plan.decided if (each := sequences[index].controller)]:
            sampled = any(controller.sampled for controller in controllers)
            cost = controllers[0].engine.cost.of_round(max(step, len(sequences)), sampled)
            plan.round = Round([*zip(controllers, candidates, strict=True)], cost, limits)
            for index, known, decision in zip(plan.decided, continuations, plan.round.decisions, strict=True):
                self._decided(plan, index, known, decision)
        return plan

    def grow(self, plan: Plan) -> None:
        """Grow the trees that a plan leaves to the model on the host, and cut them to what is worth verifying."""
        if not (self.model and plan.shapes):
            return
        decided = {index: number for number, index in enumerate(plan.decided) if index in plan.shapes}
        asked = []
        for index, shape in plan.shapes.items():
            sequence, rule = plan.sequences[index], None
            if plan.round and index in decided and sequence.budget:
                rule = plan.round.rule(decided[index], len(plan.shapes))
                shape = shape.within(sequence.budget.nodes) or ONE
            asked.append((sequence, shape, rule))
        trees = dict(zip(plan.shapes, self.model.grow(asked), strict=True))
        counts = plan.round.cut({number: trees[index] for index, number in decided.items()}) if plan.round else {}
        for index, growth in trees.items():
            proposal = plan.proposals[index]
            proposal.tree, proposal.grown = growth.tree(counts[decided[index]] if index in decided else None), True
            if index in decided:
                proposal.chances = growth.chances()

    def commit(self, sequence: Sequence, proposal: Proposal, path: Seq[int]) -> None:
        """Note the accepted nodes of the tree just proposed; `path`: the nodes, the root first."""
        if self.model and proposal.grown:
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
        budget = sequence.budget
        if not sequence.sampler.foresees or not budget:
            return None
        found = sequence.sampler.follow((), (), min(budget.shape.nodes, budget.nodes))
        decision = Decision("forced", len(found)) if sequence.controller else None
        return Proposal(Tree.chain([sequence.tokens[-1], *found]), decision) if found else None

    def _of_shape(self, plan: Plan, index: int, sequence: Sequence, shape: TreeSpec) -> None:
        """Plan a tree of the shape that a request names: a continuation that is certain, else the model's."""
        known = self._continuation(sequence, shape.longest_chain)
        if self.model and known.matched < CERTAIN:
            plan.shapes[index] = shape
        else:
            tree = Tree.chain([sequence.tokens[-1], *known.tokens])
            plan.proposals[index].tree = constrained(sequence, tree, shape.nodes)

    def _continuation(self, sequence: Sequence, count: int) -> Continuation:
        """Return what the prediction or, if more tokens match, the text itself goes on with, unless that is forbidden.

        Args:
            sequence: The sequence.
            count: Maximum tokens.
        """
        text, known = sequence.text, NO_CONTINUATION
        if not self.looks_up:
            return known
        if text.prediction and (tokens := text.prediction.continuation(count)):
            known = Continuation("prediction", min(text.prediction.matched, MAX_MATCH), tokens)
        if known.matched < MAX_MATCH:
            start, matched = longest(text.string)
            if matched > known.matched:
                known = Continuation("lookup", matched, continuation(text.tokens, start, count))
        if known.tokens and sequence.sampler.foresees:
            first = [known.tokens[0]]
            return known if sequence.sampler.follow((), first, 1) == first else NO_CONTINUATION
        return known

    def _decided(self, plan: Plan, index: int, known: Continuation, decision: Decision) -> None:
        """Put a decision into the plan."""
        sequence, proposal = plan.sequences[index], plan.proposals[index]
        controller, budget = sequence.controller, sequence.budget
        assert controller
        assert budget
        proposal.decision = decision
        if known.matched:
            chance = controller.chances.continuation(known.matched, 1)[0]
            proposal.guess = Guess(known.drafter, known.tokens[0], chance)
        if decision.kind == known.drafter:
            tokens = known.tokens[: decision.nodes]
            proposal.tree = constrained(sequence, Tree.chain([sequence.tokens[-1], *tokens]), budget.nodes)
            same = _common(tokens, proposal.tree.tokens[1:])
            chances = controller.chances.continuation(known.matched, same)
            proposal.chances = [*chances, *[0.0] * (len(proposal.tree) - same)]
        elif decision.kind != "plain":
            plan.shapes[index] = ONE if decision.kind == "probe" else budget.shape


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
