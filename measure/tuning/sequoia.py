"""The best tree of a size, where a node's chance depends on its rank among its siblings and on its depth.

Sequoia (arXiv 2402.12374) finds it by dynamic programming over subtrees. A tree's expected number of accepted nodes is
the sum of its nodes' chances, each the product along its path, and no child's is above its parent's or its elder
sibling's. So the N likeliest nodes make a tree, and none of N nodes is better: they are taken best first. The test
holds it against the dynamic programme and against every tree there is.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def best_tree(chances: Sequence[Sequence[float]], nodes: int) -> tuple[float, list[int]]:
    """Expected accepted nodes of the best tree of `nodes`, and its parents, −1 for children of the root.

    chances[d][k]: that the child of rank k of a node at depth d is accepted, where that node was; falling in k.
    """
    parents, total = list[int](), 0.0
    heap: list[tuple[float, int, int, int]] = []  # −chance, parent, depth of the parent, rank

    def offer(chance: float, parent: int, depth: int, rank: int) -> None:
        if depth < len(chances) and rank < len(chances[depth]) and chances[depth][rank] > 0:
            heapq.heappush(heap, (-chance * chances[depth][rank], parent, depth, rank))

    reached = {-1: 1.0}  # by node
    offer(1.0, -1, 0, 0)
    while heap and len(parents) < nodes:
        chance, parent, depth, rank = heapq.heappop(heap)
        node = len(parents)
        parents.append(parent)
        reached[node], total = -chance, total - chance
        offer(reached[node], node, depth + 1, 0)
        offer(reached[parent], parent, depth, rank + 1)
    return total, parents
