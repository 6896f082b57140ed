"""The controller: decides what each round drafts, and learns what became of it.

A round's candidates are the continuations of its sequences' texts and trees of the draft model; `goodput` chooses. No
token depends on any of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from .cost_model import CostModel, RoundCost
from .goodput import Candidate, allocate, cut
from .proposal import PLAIN, Continuation, Decision, Proposal
from .sessions import Session, Sessions
from .timing_table import UNLIKELY, Chances
from .tree import TreeSpec
from .tree_growth import Growth, GrowthRule

HOPE = 1.25  # how much better than calibrated a draft model might do; one that would not pay even so is never tried


@dataclass(frozen=True, slots=True)
class SequenceController:
    """The calibration of a sequence's drafters, and the acceptance of each in its session."""

    engine: Controller
    chances: Chances
    sampled: bool
    session: Session

    def candidate(self, continuation: Continuation, nodes: int, shape: TreeSpec, backlog: int) -> Candidate:
        """Return what the sequence may draft.

        Args:
            continuation: How its text may go on.
            nodes: Maximum nodes.
            shape: The largest tree of the model.
            backlog: Tokens of the text that the draft model has not read.
        """
        chances = self.chances.continuation(continuation.matched, min(nodes, len(continuation.tokens)))
        path = self.session.drafters[continuation.drafter].path(chances)
        trees = self._trees(self.session.drafters["levels"].ratio, min(nodes, shape.depth))
        return Candidate(path, trees, nodes, shape.width, backlog, continuation.drafter)

    def optimistic(self, candidate: Candidate) -> Candidate:
        """Return what a candidate would be if the model did better than calibrated, and the text did not go on."""
        return replace(candidate, path=(), trees=self._trees(HOPE, len(candidate.trees) - 1))

    def _trees(self, ratio: float, levels: int) -> list[float]:
        """Return the accepted tokens of the model's trees, by their levels, from 0."""
        each = self.chances.levels(ratio)[:levels] if self.engine.has_model else []
        return [0.0, *accumulate(each)]

    def record(self, proposal: Proposal, path: Sequence[int], token: int, ended: bool = False) -> None:
        """Learn from a round; the text's continuation is judged even if it was not drafted.

        A trial is a node of the path that had children by chance. `accepted` of them succeeded; if fewer than all did,
        the last one failed.

        Args:
            proposal: What was drafted.
            path: The accepted nodes, the root first.
            token: The first emitted token.
            ended: Whether the text ended with the path.
        """
        kind, chances = proposal.decision.kind if proposal.decision else "plain", proposal.chances
        parents = path[:-1] if ended else path
        trials = [min(chances[node], 1.0) for node in parents if chances[node]] if chances else []
        accepted = min(len(path) - 1, len(trials))
        if kind in ("lookup", "prediction"):
            self.session.record(kind, accepted, trials)
            return
        if (text := proposal.continuation) and text.matched:
            self.session.record(text.drafter, int(token == text.tokens[0]), self.chances.continuation(text.matched, 1))
        if kind in ("model", "probe") and parents:
            self.session.record("model", accepted, trials)
            # A tree that was cut to nothing is a failure of its first level.
            levels = self.chances.below(max(len(trials), 1))
            self.session.record("levels", min(accepted, len(levels)), levels)
        if kind == "probe":
            self.session.backoff.record(accepted)


class RoundDecisions:
    """One round's decisions, by the index of their sequence, and how far the model's trees grow."""

    def __init__(
        self,
        sequences: Mapping[int, tuple[SequenceController, Candidate]],
        cost: RoundCost,
        min_speedup: float = 1.0,
    ) -> None:
        """Decide a round.

        Args:
            sequences: The sequences that may draft.
            cost: The round's prices.
            min_speedup: Speedup over plain decoding that the round must promise to draft at all.
        """
        self._cost, self._sequences, self._min_speedup = cost, sequences, min_speedup
        self.decisions, self._tokens, self._rate = dict.fromkeys(sequences, PLAIN), float(cost.sequences), 0.0
        candidates = [candidate for _, candidate in sequences.values()]
        if all(len(each.trees) < 2 and (not each.path or each.path[0] < UNLIKELY) for each in candidates):
            return  # a few microseconds where there is nothing to draft
        best = allocate(candidates, cost, self._min_speedup)
        self._rate, speedup = best.goodput, best.goodput * cost.plain / cost.sequences
        for index, each, nodes, levels in zip(sequences, candidates, best.nodes, best.levels, strict=True):
            if levels:
                self.decisions[index] = Decision("model", nodes, levels, speedup)
            elif nodes:
                self.decisions[index] = Decision(each.drafter, nodes, 0, speedup)
                self._tokens += sum(each.path[:nodes])
        self._probe()

    def _probe(self) -> None:
        """Let the model draft a token for one sequence that decodes plainly, if it is time for that."""
        waiting = dict[int, int]()  # by backoff, the first sequence that waits for it
        for index, (controller, candidate) in self._sequences.items():
            if self.decisions[index] is PLAIN and len(candidate.trees) > 1:
                waiting.setdefault(id(controller.session.backoff), index)
        for index in waiting.values():
            controller, candidate = self._sequences[index]
            backoff = controller.session.backoff
            if not backoff.tick():
                continue
            if allocate([controller.optimistic(candidate)], self._cost, self._min_speedup).levels[0]:
                self.decisions[index] = Decision("probe", 1, 1)
                return
            backoff.skip()

    def rule(self, index: int, trees: int) -> GrowthRule:
        """Return the rule by which a sequence's tree grows, in steps that so many trees share."""
        controller, _ = self._sequences[index]
        ratio = controller.session.drafters["model"].ratio
        return GrowthRule(controller.chances, ratio, self._rate, self._cost, trees)

    def cut(self, trees: Mapping[int, Growth]) -> dict[int, int]:
        """Return how many nodes of each tree to verify, by the index of its sequence; of a probe's, one."""
        drafts = [index for index in trees if self.decisions[index].kind == "model"]
        texts = [each.nodes for each in self.decisions.values() if each.kind in ("lookup", "prediction")]
        seconds = self._cost.draft(max((growth.depth for growth in trees.values()), default=0), [0] * len(trees))
        sizes = cut([trees[index].ranked() for index in drafts], texts, self._tokens, seconds, self._cost)
        return dict.fromkeys(trees, 1) | dict(zip(drafts, sizes, strict=True))


class Controller:
    """An engine's controller: every request that leaves speculation to it gets a `SequenceController`."""

    def __init__(self, cost: CostModel, has_model: bool = False) -> None:
        """Make an engine's controller.

        Args:
            cost: What rounds cost.
            has_model: Whether there is a model to draft with.
        """
        self.cost, self.has_model, self.sessions = cost, has_model, Sessions()

    def for_request(
        self, temperature: float, session: str | None = None, background: bool = False
    ) -> SequenceController:
        """Return a sequence's controller, which begins with what its session, or else the engine, knows; any thread.

        A request in the background knows nothing of others, and they learn nothing from it.
        """
        sampled = temperature > 0
        shared = Session() if background else self.sessions.of(session, sampled)
        return SequenceController(self, self.cost.table.chances[sampled], sampled, shared)
