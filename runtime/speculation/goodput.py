"""How many nodes a round drafts for each sequence: as many as bring most tokens a second.

    goodput(k) = (n + Σ_s E_s(k_s)) / (T_verify(n + Σ_s k_s) + T_draft(levels) + T_host)
    E_s(k) = Σ_{i ≤ k} Π_{j ≤ i} p_j

Without drafts a round emits a token of each of its n sequences. p_j is the calibrated chance of a sequence's j-th
drafted token, times what was accepted of its drafter's tokens over what was expected. Sources: SmartSpec and TurboSpec
(arXiv 2406.14066) for the goodput, CaDDTree (2606.01813) for trees that are cut by their real likelihoods.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from .cost_model import RoundCost
from .sessions import TextDrafter

MARGIN = 0.1  # tokens by which each drafting sequence must beat plain decoding's one: chances and costs are estimates
UNLIKELY = 0.05  # a token less likely than this is not weighed
NODES_A_LEVEL = 2  # nodes of a tree's level that are verified in the end, about


@dataclass(frozen=True, slots=True)
class Candidate:
    """The drafts that a sequence may choose from.

    Attributes:
        path: Chance that each token of its text's continuation is accepted, with all before it.
        trees: Accepted tokens of the draft model's trees, by their levels, from 0; `[0]` without a model.
        nodes: Maximum nodes.
        branches: Whether trees have side branches.
        backlog: Tokens of its text that the draft model has not read.
        drafter: Where the continuation comes from.
    """

    path: Sequence[float]
    trees: Sequence[float] = (0.0,)
    nodes: int = 0
    branches: bool = True
    backlog: int = 0
    drafter: TextDrafter = "lookup"

    def size(self, levels: int) -> int:
        """Return how many nodes of a tree of so many levels are verified, about."""
        return min((NODES_A_LEVEL if self.branches else 1) * levels, self.nodes)


@dataclass(frozen=True, slots=True)
class Allocation:
    """A round's drafted nodes and levels of the model's tree, by candidate, and its expected tokens and seconds."""

    nodes: tuple[int, ...]
    levels: tuple[int, ...]
    tokens: float
    seconds: float

    @property
    def goodput(self) -> float:
        """Tokens a second of all the round's sequences."""
        return self.tokens / self.seconds


def plain(candidates: Sequence[Candidate], cost: RoundCost) -> Allocation:
    """Return the round in which nothing is drafted."""
    nothing = (0,) * len(candidates)
    return Allocation(nothing, nothing, cost.sequences, cost.plain)


def allocate(candidates: Sequence[Candidate], cost: RoundCost, min_speedup: float = 1.0) -> Allocation:
    """Return the allocation of most goodput, or `plain` if none beats that by MARGIN and `min_speedup`."""
    nothing = plain(candidates, cost)
    texts = best = _continuations(candidates, cost, nothing)
    before = 0.0
    for levels in range(1, max((len(each.trees) for each in candidates), default=0)):
        if cost.model.padded and levels & (levels - 1):
            continue  # a device has a graph for each number of levels
        grown = _trees(levels, candidates, texts, best.goodput, cost)
        if grown.goodput < before:
            break
        best, before = max(best, grown, key=lambda each: each.goodput), grown.goodput
    drafting = sum(nodes > 0 for nodes in best.nodes)
    needed = nothing.goodput * max(min_speedup, 1 + MARGIN * drafting / cost.sequences)
    return best if best.goodput >= needed else nothing


def _continuations(candidates: Sequence[Candidate], cost: RoundCost, nothing: Allocation) -> Allocation:
    """Return the best allocation of continuations alone: tokens are taken in order of their chance."""
    tokens = [(chance, number) for number, each in enumerate(candidates) for chance in each.path[: each.nodes]]
    tokens = sorted((each for each in tokens if each[0] >= UNLIKELY), key=lambda each: -each[0])
    best, expected, nodes = nothing, nothing.tokens, list(nothing.nodes)
    for count, (chance, number) in enumerate(tokens, 1):
        expected, nodes[number] = expected + chance, nodes[number] + 1
        seconds = cost.verify(count, max(nodes))
        if expected > best.goodput * seconds:
            best = Allocation(tuple(nodes), nothing.levels, expected, seconds)
    return best


def _trees(levels: int, candidates: Sequence[Candidate], texts: Allocation, rate: float, cost: RoundCost) -> Allocation:
    """Return `texts` with trees of so many levels wherever they bring more than their seconds at `rate` tokens."""
    nodes, grown, expected = list(texts.nodes), [0] * len(candidates), float(cost.sequences)
    for number, each in enumerate(candidates):
        text = sum(each.path[: nodes[number]])
        depth = min(levels, len(each.trees) - 1)
        size = each.size(depth)
        further = cost.row * (size - nodes[number]) + cost.reading(each.backlog)
        if size > 0 and each.trees[depth] - text > rate * further:
            nodes[number], grown[number], text = size, depth, each.trees[depth]
        expected += text
    unread = [each.backlog for each, depth in zip(candidates, grown, strict=True) if depth]
    seconds = cost.verify(sum(nodes), max(nodes)) + (cost.draft(max(grown), unread) if unread else 0.0)
    return Allocation(tuple(nodes), tuple(grown), expected, seconds)


def cut(
    trees: Sequence[Sequence[float]], texts: Sequence[int], tokens: float, spent: float, cost: RoundCost
) -> list[int]:
    """Return how many nodes of each grown tree to verify for most goodput.

    Args:
        trees: The chance of each node, the likeliest first.
        texts: Nodes of each continuation that is verified beside them.
        tokens: Tokens that the round brings without the trees.
        spent: Seconds that growing them took.
        cost: The round's prices.
    """
    chances = np.concatenate([np.asarray(each, dtype=np.float64) for each in trees])
    whose = np.repeat(np.arange(len(trees)), [len(each) for each in trees])
    order = np.argsort(-chances, kind="stable")
    beside, longest = sum(texts), max(texts, default=0)
    counts, best, rate = [0] * len(trees), [0] * len(trees), tokens / (spent + cost.verify(beside, longest))
    expected = accumulate(chances[order].tolist())
    for count, (number, more) in enumerate(zip(whose[order].tolist(), expected, strict=True), 1):
        counts[number] += 1
        seconds = spent + cost.verify(beside + count, max(longest, *counts))
        if tokens + more > rate * seconds:
            best, rate = counts.copy(), (tokens + more) / seconds
    return best
