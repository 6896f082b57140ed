"""The controller: decides what each round drafts, and learns what became of it.

A round's candidates are the continuations of its sequences' texts and trees of the draft model; `goodput` chooses. No
token depends on any of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal

from .cost_model import CostModel, RoundCost
from .draft_limits import NO_LIMITS, Limits
from .goodput import UNLIKELY, Candidate, allocate, cut
from .sessions import Backoff, Session, Sessions, TextDrafter
from .timing_table import Chances
from .tree import Tree, TreeSpec
from .tree_growth import Growth, GrowthRule

MAX_CONTINUATION = 24  # tokens of a text's continuation
HOPE = 1.25  # how much better than calibrated a draft model might do; one that would not pay even so is never tried

Kind = Literal["plain", "lookup", "prediction", "model", "probe", "forced"]


@dataclass(frozen=True, slots=True)
class Decision:
    """The drafter and the size of a sequence's draft in a round.

    Attributes:
        kind: The drafter; "probe": the model's likeliest token, to see how it fares; "forced": by a constraint.
        nodes: Drafted nodes of a continuation; of a tree about so many, which bind where a device grows it.
        levels: Levels of the model's tree, which bind there too.
        speedup: The round's expected tokens a second over those of plain decoding.
    """

    kind: Kind
    nodes: int = 0
    levels: int = 0
    speedup: float = 1.0


PLAIN = Decision("plain")


@dataclass(frozen=True, slots=True)
class Guess:
    """The first token of a text's continuation, where it comes from, and its calibrated chance."""

    drafter: TextDrafter
    token: int
    chance: float


@dataclass(slots=True)
class Proposal:
    """A sequence's drafted tree.

    Attributes:
        tree: The tree; its root is the sequence's last token.
        decision: What was decided; None for a request that names its tree.
        chances: By node, the calibrated chance that a child of it is accepted; 0: it has none, or a forced one.
        guess: How the text may go on, drafted or not; None: nothing is known.
        grown: Whether the model on the host grew it.
        shape: The shape of the tree that a device grows below the root, in place of `tree`; None: `tree` is all.
    """

    tree: Tree
    decision: Decision | None = None
    chances: list[float] = field(default_factory=list)
    guess: Guess | None = None
    grown: bool = False
    shape: TreeSpec | None = None

    @property
    def nodes(self) -> int:
        """Nodes of the tree, its root included; the maximum if a device grows it."""
        return 1 + self.shape.nodes if self.shape else len(self.tree)


@dataclass(frozen=True, slots=True)
class SequenceController:
    """The calibration of a sequence's drafters, and the acceptance of each in its session."""

    engine: Controller
    chances: Chances
    sampled: bool
    session: Session

    def candidate(self, drafter: TextDrafter, matched: int, room: int, shape: TreeSpec, unread: int = 0) -> Candidate:
        """Return what the sequence may draft.

        Args:
            drafter: Where the text's continuation comes from.
            matched: Tokens that match before it; 0: there is none.
            room: Maximum nodes.
            shape: The largest tree of the model.
            unread: Tokens of the text that the draft model has not run.
        """
        continuation = self.chances.continuation(matched, min(room, MAX_CONTINUATION)) if matched else []
        reached = self.session.drafters[drafter].reached(continuation)
        brought = self._brought(self.session.drafters["levels"].ratio, min(room, shape.depth))
        return Candidate(reached, brought, room, shape.width > 1, unread, drafter)

    def hopeful(self, candidate: Candidate) -> Candidate:
        """Return what a candidate would be if the model did better than calibrated, and the text did not go on."""
        return replace(candidate, reached=(), brought=self._brought(HOPE, len(candidate.brought) - 1))

    def _brought(self, ratio: float, levels: int) -> list[float]:
        """Return the tokens that trees of the model bring, by their levels, from 0."""
        each = self.chances.levels(ratio)[: max(levels, 0)] if self.engine.has_model else []
        return [0.0, *accumulate(each)]

    def record(self, proposal: Proposal, path: Sequence[int], token: int, ended: bool = False) -> None:
        """Learn from a round; the text's continuation is judged even if it was not drafted.

        A trial is a node of the path that had children by chance; the last one failed, unless the text ended there.

        Args:
            proposal: What was drafted.
            path: The accepted nodes, the root first.
            token: The first emitted token.
            ended: Whether the text ended with the path.
        """
        kind = proposal.decision.kind if proposal.decision else "plain"
        tried, chances = path[:-1] if ended else path, proposal.chances
        trials = [min(chances[node], 1.0) for node in tried if chances[node]] if chances else []
        accepted = min(len(path) - 1, len(trials))
        if kind in ("lookup", "prediction"):
            self.session.record(kind, accepted, trials)
            return
        if guess := proposal.guess:
            self.session.record(guess.drafter, int(token == guess.token), [guess.chance])
        if kind in ("model", "probe") and tried:
            self.session.record("model", accepted, trials)
            # A tree that was cut to nothing is a failure of its first level.
            levels = self.chances.below(max(len(trials), 1))
            self.session.record("levels", min(accepted, len(levels)), levels)
        if kind == "probe":
            self.session.backoff.record(accepted)


class Round:
    """One round's decisions, in the order of its sequences, and how far the model's trees grow."""

    def __init__(
        self, sequences: Sequence[tuple[SequenceController, Candidate]], cost: RoundCost, limits: Limits = NO_LIMITS
    ) -> None:
        """Decide a round.

        Args:
            sequences: The sequences that may draft.
            cost: The round's prices.
            limits: The operator's limits.
        """
        self._cost, self._sequences = cost, sequences
        self.decisions, self._tokens, self._rate = [PLAIN] * len(sequences), float(cost.sequences), 0.0
        candidates = [candidate for _, candidate in sequences]
        if all(len(each.brought) < 2 and (not each.reached or each.reached[0] < UNLIKELY) for each in candidates):
            return  # a few microseconds where there is nothing to draft
        best = allocate(candidates, cost, limits.min_expected_speedup)
        self._rate, speedup = best.goodput, best.goodput * cost.plain / cost.sequences
        for number, (nodes, levels) in enumerate(zip(best.nodes, best.levels, strict=True)):
            if levels:
                self.decisions[number] = Decision("model", nodes, levels, speedup)
            elif nodes:
                self.decisions[number] = Decision(candidates[number].drafter, nodes, 0, speedup)
                self._tokens += sum(candidates[number].reached[:nodes])
        self._probe(limits)

    def _probe(self, limits: Limits) -> None:
        """Let the model draft a token for one sequence that decodes plainly, if it is time for that."""
        waiting = dict[int, tuple[Backoff, int]]()  # backoffs, each with the first sequence that waits for it
        for number, (controller, candidate) in enumerate(self._sequences):
            if self.decisions[number].kind == "plain" and len(candidate.brought) > 1:
                waiting.setdefault(id(controller.session.backoff), (controller.session.backoff, number))
        for backoff, number in waiting.values():
            if not backoff.tick():
                continue
            backoff.begin()
            controller, candidate = self._sequences[number]
            hopeful = allocate([controller.hopeful(candidate)], self._cost, limits.min_expected_speedup)
            if hopeful.levels[0]:  # one that would not pay even so is never tried
                self.decisions[number] = Decision("probe", 1, 1)
                return

    def rule(self, number: int, sharing: int) -> GrowthRule:
        """Return the rule by which a sequence's tree grows, in steps that so many trees share."""
        controller, _ = self._sequences[number]
        ratio = controller.session.drafters["model"].log_ratio
        return GrowthRule(controller.chances, ratio, self._rate, self._cost, sharing)

    def cut(self, trees: Mapping[int, Growth]) -> dict[int, int]:
        """Return how many nodes of each grown tree to verify, by the number of its sequence; of a probe's, one."""
        counts, grown = dict.fromkeys(trees, 1), [n for n in trees if self.decisions[n].kind == "model"]
        if grown:
            texts = [decision.nodes for decision in self.decisions if decision.kind in ("lookup", "prediction")]
            spent = self._cost.draft(max(growth.depth for growth in trees.values()), [0] * len(trees))
            sizes = cut([trees[n].ranked() for n in grown], texts, self._tokens, spent, self._cost)
            counts |= dict(zip(grown, sizes, strict=True))
        return counts


class Controller:
    """An engine's controller: every request that leaves speculation to it gets a `SequenceController`."""

    def __init__(self, cost: CostModel, has_model: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        """Make an engine's controller.

        Args:
            cost: What rounds cost.
            has_model: Whether there is a model to draft with.
            clock: Returns seconds, by which sessions are forgotten.
        """
        self.cost, self.has_model, self.sessions = cost, has_model, Sessions(clock)

    def for_request(
        self, temperature: float, session: str | None = None, background: bool = False
    ) -> SequenceController:
        """Return a sequence's controller, which begins with what its session, or else the engine, knows; any thread.

        A request in the background knows nothing of others, and they learn nothing from it.
        """
        sessions, sampled = Sessions() if background else self.sessions, temperature > 0
        return SequenceController(self, self.cost.table.chances(sampled), sampled, sessions.of(session, sampled))
