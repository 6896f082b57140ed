"""The best fixed tree of a size, if a node's acceptance depends only on its depth and its rank among its siblings.

Sequoia (arXiv 2402.12374) finds it by dynamic programming over subtrees. A tree's expected number of accepted nodes is
the sum of its nodes' chances, each the product along its path, and no child's chance is above its parent's or its
elder sibling's. So the N likeliest nodes form a tree, no tree of N nodes is better, and they are taken best first. The
test compares it with the dynamic programme and with every possible tree.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def best_tree(chances: Sequence[Sequence[float]], nodes: int) -> tuple[float, list[int]]:
    """Return the best tree's expected number of accepted nodes, and its nodes' parents (−1: the root).

    Args:
        chances: `chances[d][k]` is the probability that the rank-k child of an accepted node at depth d is accepted; it
            falls with k.
        nodes: Nodes of the tree, the root not counted.
    """
    parents, total = list[int](), 0.0
    heap: list[tuple[float, int, int, int]] = []  # −chance, parent, depth of the parent, rank

    def offer(chance: float, parent: int, depth: int, rank: int) -> None:
        if depth < len(chances) and rank < len(chances[depth]) and chances[depth][rank] > 0:
            heapq.heappush(heap, (-chance * chances[depth][rank], parent, depth, rank))

    reached = {-1: 1.0}  # the probability that each node is accepted
    offer(1.0, -1, 0, 0)
    while heap and len(parents) < nodes:
        chance, parent, depth, rank = heapq.heappop(heap)
        node = len(parents)
        parents.append(parent)
        reached[node], total = -chance, total - chance
        offer(reached[node], node, depth + 1, 0)
        offer(reached[parent], parent, depth, rank + 1)
    return total, parents
