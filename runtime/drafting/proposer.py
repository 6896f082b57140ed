"""Proposes every round's trees: what constraints force, predictions and texts go on with, and what the model grows.

A loop, a quotation or an edit is continued at no cost, and deeper than a model's tree would go. Where a
request leaves speculation to its controller, all sequences of a round are decided together.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from specbuild.runtime.requests.prediction import CERTAIN
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.requests.token_string import MAX_MATCH
from specbuild.runtime.speculation.controller import RoundDecisions, SequenceController
from specbuild.runtime.speculation.draft_limits import NO_LIMITS, Limits
from specbuild.runtime.speculation.goodput import Candidate
from specbuild.runtime.speculation.proposal import Continuation, Decision, Proposal
from specbuild.runtime.speculation.tree import Tree, TreeSpec
from specbuild.runtime.speculation.tree_growth import Growth

from .lookup import continuation, longest
from .model import Draft, ModelDrafter

ONE = TreeSpec.parse("chain:1")
MAX_CONTINUATION = 2 * MAX_MATCH  # tokens
NO_CONTINUATION = Continuation("lookup", 0, [])


@dataclass(frozen=True, slots=True)
class Plan:
    """A round's sequences that draft, and what each proposes; `round`: the decisions, None if nothing was decided.

    A proposal with a shape is the root alone, below which the model has to grow a tree.
    """

    sequences: Seq[Sequence]
    proposals: Seq[Proposal]
    round: RoundDecisions | None


class Proposer:
    """Drafts from texts, and with a model if there is one."""

    def __init__(self, model: ModelDrafter | None = None, looks_up: bool = True) -> None:
        """Make a proposer.

        Args:
            model: Grows trees on the host; None: nothing does.
            looks_up: Whether texts are continued from themselves; False leaves drafting to the model.
        """
        self.model, self.looks_up = model, looks_up

    def propose(self, sequences: Seq[Sequence], step: int = 0, limits: Limits = NO_LIMITS) -> list[Proposal]:
        """Return a proposal for each sequence; see `plan`."""
        return self.grow(self.plan(sequences, step, limits), range(len(sequences)))

    def plan(self, sequences: Seq[Sequence], step: int = 0, limits: Limits = NO_LIMITS) -> Plan:
        """Decide what each sequence drafts.

        Args:
            sequences: The sequences that draft, with their budgets.
            step: Sequences in the round's step, those that only decode or prefill included; 0: these alone.
            limits: The operator's limits.
        """
        proposals = [self._undecided(sequence) for sequence in sequences]
        candidates = dict[int, tuple[SequenceController, Candidate]]()
        for index, (sequence, proposal) in enumerate(zip(sequences, proposals, strict=True)):
            if (text := proposal.continuation) and (controller := sequence.controller) and sequence.budget:
                backlog = self.model.backlog(sequence) if self.model else 0
                candidate = controller.candidate(text, sequence.budget.nodes, sequence.budget.shape, backlog)
                candidates[index] = controller, candidate
        if not candidates:
            return Plan(sequences, proposals, None)
        controllers = [controller for controller, _ in candidates.values()]
        sampled = any(controller.sampled for controller in controllers)
        cost = controllers[0].engine.cost.of_round(max(step, len(sequences)), sampled)
        round_ = RoundDecisions(candidates, cost, limits.min_expected_speedup)
        for index, decision in round_.decisions.items():
            proposals[index] = self._decide(sequences[index], proposals[index], decision)
        return Plan(sequences, proposals, round_)

    def grow(self, plan: Plan, indices: Iterable[int]) -> list[Proposal]:
        """Return a plan's proposals; trees of the sequences at `indices` are grown, and cut to what is worth verifying.

        Args:
            plan: The plan.
            indices: The sequences whose trees grow on the host.
        """
        proposals, decisions = [*plan.proposals], plan.round.decisions if plan.round else ()
        shapes = {index: shape for index in indices if (shape := proposals[index].shape)}
        if not (self.model and shapes):
            return proposals
        drafts = dict[int, Draft]()
        for index, shape in shapes.items():
            sequence, rule = plan.sequences[index], None
            if plan.round and index in decisions and sequence.budget:
                shape = shape.within(sequence.budget.nodes) or ONE
                rule = plan.round.rule(index, len(shapes))
            drafts[index] = Draft(sequence, Growth(shape, proposals[index].tree, rule))
        self.model.grow([*drafts.values()])
        counts = plan.round.cut({i: drafts[i].growth for i in drafts if i in decisions}) if plan.round else {}
        for index, draft in drafts.items():
            tree, growth = draft.growth.tree(counts.get(index)), draft.growth
            chances = growth.chances() if growth.rule else ()
            proposals[index] = replace(proposals[index], tree=tree, chances=chances, shape=None, growth=growth)
        return proposals

    def commit(self, sequence: Sequence, proposal: Proposal, path: Seq[int]) -> None:
        """Note the accepted nodes of a tree; `path`: the nodes, the root first."""
        if self.model and proposal.growth:
            self.model.commit(sequence.slot, proposal.growth, path)

    def _undecided(self, sequence: Sequence) -> Proposal:
        """Return the root with how its text goes on, if its controller decides; else what the sequence drafts.

        That is what its constraint leaves no choice about, a continuation that is certain, or the model's tree.
        """
        root, budget, controller = sequence.tokens[-1], sequence.budget, sequence.controller
        if not budget:
            return Proposal(Tree([root]))
        if forced := sequence.sampler.follow((), (), min(budget.shape.nodes, budget.nodes)):
            return Proposal(Tree.chain([root, *forced]), Decision("forced", len(forced)) if controller else None)
        if controller:
            return Proposal(
                Tree([root]), continuation=self._continuation(sequence, min(budget.nodes, MAX_CONTINUATION))
            )
        text = self._continuation(sequence, budget.shape.longest_chain)
        if self.model and text.matched < CERTAIN:
            return Proposal(Tree([root]), shape=budget.shape)
        return Proposal(Tree.chain([root, *legal(sequence, text.tokens, budget.shape.nodes)]))

    def _continuation(self, sequence: Sequence, count: int) -> Continuation:
        """Return what the prediction or, if more tokens match, the text itself goes on with, unless that is forbidden.

        Args:
            sequence: The sequence.
            count: Maximum tokens.
        """
        text, best = sequence.text, NO_CONTINUATION
        if not self.looks_up:
            return best
        if text.prediction and (tokens := text.prediction.continuation(count)):
            best = Continuation("prediction", min(text.prediction.matched, MAX_MATCH), tokens)
        if best.matched < MAX_MATCH:
            start, matched = longest(text.string)
            if matched > best.matched:
                best = Continuation("lookup", matched, continuation(text.tokens, start, count))
        first = best.tokens[:1]
        return best if legal(sequence, first, 1) == first else NO_CONTINUATION

    def _decide(self, sequence: Sequence, proposal: Proposal, decision: Decision) -> Proposal:
        """Return a decided proposal: the root alone, a continuation, or the shape of the tree to grow."""
        text, controller, budget = proposal.continuation, sequence.controller, sequence.budget
        assert text
        assert controller
        assert budget
        if decision.kind in ("model", "probe"):
            return replace(proposal, decision=decision, shape=ONE if decision.kind == "probe" else budget.shape)
        if decision.kind == "plain":
            return replace(proposal, decision=decision)
        drafted = text.tokens[: decision.nodes]
        tokens = legal(sequence, drafted, budget.nodes)
        by_chance = next((i for i, (a, b) in enumerate(zip(drafted, tokens, strict=False)) if a != b), len(tokens))
        chances = controller.chances.continuation(text.matched, min(by_chance, len(drafted)))
        chances += [0.0] * (1 + len(tokens) - len(chances))
        return replace(proposal, tree=Tree.chain([*proposal.tree.tokens, *tokens]), decision=decision, chances=chances)


def legal(sequence: Sequence, tokens: Seq[int], nodes: int) -> list[int]:
    """Return the tokens that a sequence's constraint allows after its text, and those that it forces after them.

    `nodes`: maximum tokens that it adds up to.
    """
    return sequence.sampler.follow((), tokens, max(nodes, len(tokens))) if tokens else []
