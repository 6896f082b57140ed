"""Acceptance rates of drafts on real texts: by likelihood, and for lookup by the match's length."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from specbuild.runtime.drafting.lookup import longest
from specbuild.runtime.drafting.model import Draft, ModelDrafter
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.requests.token_string import MAX_MATCH, string_of
from specbuild.runtime.speculation.tree import BEST_DEPTH, Tree, TreeSpec, walk
from specbuild.runtime.speculation.tree_growth import Growth

BINS = 8  # bins of the calibration
DOUBT = 2.0  # pseudo-trials, one of them accepted, that smooth the rates of rarely seen events


@dataclass(slots=True)
class Record:
    """Observations of drafts: trials of children whose parent was accepted, and the rounds' trees."""

    likelihoods: list[float] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)
    orders: list[tuple[int, list[int]]] = field(default_factory=list)  # nodes of a tree; accepted ones' ranks by score
    depths: list[int] = field(default_factory=list)  # grown levels of each tree

    @classmethod
    def sum(cls, records: Iterable[Record]) -> Record:
        """Return one record with the observations of several."""
        total = cls()
        for record in records:
            for each in fields(cls):
                getattr(total, each.name).extend(getattr(record, each.name))
        return total

    def reach(self) -> list[float]:
        """Return the mean number of accepted tokens in the first d levels, for d from 0 to BEST_DEPTH."""
        depths = np.array([len(accepted) for _, accepted in self.orders] or [0])
        return [float(np.minimum(depths, levels).mean()) for levels in range(BEST_DEPTH + 1)]

    def accepted_of(self, nodes: int) -> float:
        """Return the mean number of accepted tokens among the best `nodes` nodes of each tree."""
        found = [sum(rank < nodes for rank in accepted) for _, accepted in self.orders]
        return float(np.mean(found)) if found else 0.0

    def step(self) -> float:
        """Return how often, smoothed, some child of an accepted node that has children is accepted."""
        accepted = sum(len(ranks) for _, ranks in self.orders)
        ended = sum(len(ranks) < BEST_DEPTH for _, ranks in self.orders)
        return (accepted + 1) / (accepted + ended + DOUBT)

    def calibration(self) -> tuple[list[float], list[float]]:
        """Return log likelihoods and their acceptance rates, over bins of equally many trials and made monotone."""
        likelihoods, accepted = np.array(self.likelihoods), np.array(self.accepted)
        groups = [group for group in np.array_split(np.argsort(likelihoods), BINS) if len(group)]
        likely = [float(likelihoods[group].mean()) for group in groups]
        wins = [float(accepted[group].sum()) + 1.0 for group in groups]
        return _monotone(likely, wins, [len(group) + DOUBT for group in groups])

    def chances(self, texts: Iterable[Sequence]) -> dict[str, Any]:
        """Return the acceptance rates of drafts and of lookup on texts, as the timing table stores them."""
        likely, chance = self.calibration() if self.likelihoods else ([0.0], [0.0])
        lookup = lookup_chances([(text.tokens, text.metrics.num_prompt_tokens) for text in texts])
        return {"likely": likely, "chance": chance, "step": self.step(), "reach": self.reach(), "lookup": lookup}

    def trust(self) -> dict[str, Any]:
        """Return how reliable the draft's likelihoods are, for the report; empty if nothing was drafted."""
        if not self.likelihoods:
            return {}
        return {"trials": len(self.likelihoods), "calibration_error": self.error()}

    def error(self) -> float | None:
        """Return the expected calibration error, cross-validated: each half is judged by the other half's calibration.

        It is the mean gap between expected and observed acceptance over bins of equal size; None with fewer than two
        trials.
        """
        middle, gaps = len(self.likelihoods) // 2, 0.0
        if not middle:
            return None
        halves = [Record(self.likelihoods[part], self.accepted[part]) for part in (slice(middle), slice(middle, None))]
        for own, other in (halves, halves[::-1]):
            expected = np.interp(own.likelihoods, *other.calibration())
            missed = expected - np.array(own.accepted)
            gaps += sum(abs(float(missed[group].sum())) for group in np.array_split(np.argsort(expected), BINS))
        return gaps / len(self.likelihoods)


def replay(drafter: ModelDrafter, sequence: Sequence, shape: TreeSpec, rest: Seq[int], every: bool) -> list[Record]:
    """Draft trees along a known text, as if it were being decoded, and return what would have been accepted.

    Args:
        drafter: The draft model.
        sequence: The text before the first tree; it grows by the tokens of `rest`.
        shape: The shape of the trees.
        rest: The token ids that follow. No tree begins at the last BEST_DEPTH of them.
        every: Whether a tree is drafted at every token, or only where rounds with such trees would begin.
    """
    found, at = list[Record](), 0
    while at < len(rest) - BEST_DEPTH:
        growth, record = Growth(shape, Tree([sequence.tokens[-1]])), Record()
        drafter.grow([Draft(sequence, growth)])
        tree = growth.tree()
        accepted = [node for node, _ in walk(tree, lambda node: rest[at + tree.depths[node]])]  # noqa: B023
        note(record, growth, [growth.nodes[node] for node in accepted])
        drafter.commit(sequence.slot, growth, [0])
        found.append(record)
        for token in rest[at : at + (1 if every else len(accepted))]:
            sequence.emit(token, frozenset())
            at += 1
    return found


def begun(records: Seq[Record], nodes: int) -> list[Record]:
    """Return those of the records at every token where rounds begin if each round drafts `nodes` nodes."""
    found, at = list[Record](), 0
    while at < len(records):
        found.append(records[at])
        at += 1 + int(records[at].accepted_of(nodes))
    return found


def note(record: Record, growth: Growth, path: Seq[int]) -> None:
    """Add to the record what was accepted of a tree; `path`: the accepted nodes in its pool, the root first."""
    ranks = {node: rank for rank, node in enumerate(sorted(growth.nodes[1:], key=lambda n: -growth.scores[n]))}
    record.depths.append(growth.depth)
    record.orders.append((len(ranks), [ranks[node] for node in path[1:]]))
    taken = set(path)
    for node, parent in enumerate(growth.pool.parents):
        if node in ranks and parent in taken:
            record.likelihoods.append(growth.scores[node] - growth.scores[parent])
            record.accepted.append(node in taken)


def lookup_chances(texts: Seq[tuple[Seq[int], int]]) -> list[float]:
    """Return how often a text's continuation comes true after n matching tokens, n from 0; never falling with n.

    `texts`: the token ids of each text, and how many of them are its prompt.
    """
    tried, won = np.zeros(MAX_MATCH + 1), np.zeros(MAX_MATCH + 1)
    for tokens, prompt in texts:
        text = string_of(tokens)
        for end in range(prompt, len(tokens)):
            start, matched = longest(text[:end])
            if matched:
                tried[matched] += 1
                won[matched] += tokens[start] == tokens[end]
    return _monotone(list(range(MAX_MATCH + 1)), (won + DOUBT / 4).tolist(), (tried + DOUBT).tolist())[1]


def _monotone(at: list[float], won: list[float], tried: list[float]) -> tuple[list[float], list[float]]:
    """Return `at` and the shares won / tried, pooled with neighbours where they fall (pool adjacent violators)."""
    blocks = list[list[Any]]()
    for w, t in zip(won, tried, strict=True):
        blocks.append([w, t, 1])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]:
            w, t, count = blocks.pop()
            blocks[-1] = [blocks[-1][0] + w, blocks[-1][1] + t, blocks[-1][2] + count]
    inputs = [w / t for w, t, count in blocks for _ in range(count)]
    return at, inputs
