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

from .cost_model import RoundCost
from .sessions import TextDrafter
from .timing_table import UNLIKELY

MARGIN = 0.1  # tokens by which a round must beat plain decoding for each sequence that drafts: all are estimates
NODES_A_LEVEL = 2  # nodes of a tree's level that are verified in the end, about


@dataclass(frozen=True, slots=True)
class Candidate:
    """The drafts that a sequence may choose from.

    Attributes:
        path: Chance that each token of its text's continuation is accepted, with all before it.
        trees: Accepted tokens of the draft model's trees, by their levels, from 0; `[0]` without a model.
        nodes: Maximum nodes.
        width: Maximum nodes of a tree's level.
        backlog: Tokens of its text that the draft model has not read.
        drafter: Where the continuation comes from.
    """

    path: Sequence[float]
    trees: Sequence[float] = (0.0,)
    nodes: int = 0
    width: int = NODES_A_LEVEL
    backlog: int = 0
    drafter: TextDrafter = "lookup"


@dataclass(frozen=True, slots=True)
class Allocation:
    """A round's drafted nodes and levels of the model's tree, by candidate, and its expected tokens and seconds."""

    nodes: Sequence[int]
    levels: Sequence[int]
    tokens: float
    seconds: float

    @property
    def goodput(self) -> float:
        """Tokens a second of all the round's sequences."""
        return self.tokens / self.seconds


def allocate(candidates: Sequence[Candidate], cost: RoundCost, min_speedup: float = 1.0) -> Allocation:
    """Return the allocation of most goodput, which beats plain decoding by MARGIN and `min_speedup`; or no drafts."""
    zeros = [0] * len(candidates)
    nothing = Allocation(zeros, zeros, cost.sequences, cost.plain)
    texts = best = _continuations(candidates, cost, nothing)
    shallower = 0.0  # goodput with trees of fewer levels
    for levels in range(1, max((len(each.trees) for each in candidates), default=0)):
        if cost.model.padded and levels & (levels - 1):
            continue  # a device has a graph for each number of levels
        trees = _trees(levels, candidates, texts, best.goodput, cost)
        if trees.goodput < shallower:
            break
        best, shallower = max(best, trees, key=lambda each: each.goodput), trees.goodput
    drafting = sum(nodes > 0 for nodes in best.nodes)
    least = nothing.goodput * max(min_speedup, 1 + MARGIN * drafting / cost.sequences)
    return best if best.goodput >= least else nothing


def _continuations(candidates: Sequence[Candidate], cost: RoundCost, nothing: Allocation) -> Allocation:
    """Return the best allocation of continuations alone."""
    paths = [[chance for chance in each.path if chance >= UNLIKELY] for each in candidates]
    nodes = cut(paths, (), nothing.tokens, 0.0, cost, nothing.goodput)
    if not any(nodes):
        return nothing
    tokens = nothing.tokens + sum(sum(path[:count]) for path, count in zip(paths, nodes, strict=True))
    return Allocation(nodes, nothing.levels, tokens, cost.verify(sum(nodes), max(nodes)))


def _trees(levels: int, candidates: Sequence[Candidate], texts: Allocation, rate: float, cost: RoundCost) -> Allocation:
    """Return `texts` with trees of so many levels wherever they bring more than their seconds at `rate` tokens."""
    nodes, depths, tokens = list(texts.nodes), [0] * len(candidates), float(cost.sequences)
    for number, each in enumerate(candidates):
        accepted, depth = sum(each.path[: nodes[number]]), min(levels, len(each.trees) - 1)
        size = min(min(each.width, NODES_A_LEVEL) * depth, each.nodes)
        seconds = cost.row * (size - nodes[number]) + cost.reading(each.backlog)
        if size > 0 and each.trees[depth] - accepted > rate * seconds:
            nodes[number], depths[number], accepted = size, depth, each.trees[depth]
        tokens += accepted
    backlogs = [each.backlog for each, depth in zip(candidates, depths, strict=True) if depth]
    seconds = cost.verify(sum(nodes), max(nodes)) + cost.draft(max(depths), backlogs)
    return Allocation(nodes, depths, tokens, seconds)


def cut(
    trees: Sequence[Sequence[float]],
    texts: Sequence[int],
    tokens: float,
    seconds: float,
    cost: RoundCost,
    goodput: float = 0.0,
) -> list[int]:
    """Return how many nodes of each tree or continuation to verify: they are taken in order of chance.

    Args:
        trees: The chance of each node, the likeliest first.
        texts: Nodes of each continuation that is verified beside them.
        tokens: Tokens that the round brings without the trees.
        seconds: Seconds spent on growing the trees.
        cost: The round's prices.
        goodput: What the round has without them, if not what verifying the continuations brings.
    """
    beside, longest = sum(texts), max(texts, default=0)
    rate = goodput or tokens / (seconds + cost.verify(beside, longest))
    counts, best = [0] * len(trees), [0] * len(trees)
    nodes = [(chance, tree) for tree, chances in enumerate(trees) for chance in chances]
    for count, (chance, tree) in enumerate(sorted(nodes, key=lambda node: -node[0]), 1):
        tokens, counts[tree] = tokens + chance, counts[tree] + 1
        longest = max(longest, counts[tree])
        total = seconds + cost.verify(beside + count, longest)
        if tokens > rate * total:
            best, rate = counts.copy(), tokens / total
    return best
