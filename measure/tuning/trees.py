"""Trees of each size: the speedup over plain decoding that the timing table promises; and what `auto` brought."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specbuild.runtime.speculation.timing_table import Times, seconds_at
from specbuild.runtime.speculation.tree import TreeSpec

from .chances import Record, begun
from .decode import OFF, Texts, drafted, seconds

SIZES = (1, 2, 4, 8, 16, 32)  # nodes of the trees that are compared
PROBES = (1, 4, 32)  # those whose rounds are timed; in between, cost is interpolated over the logarithm of the nodes


def names(sizes: Sequence[int], largest: int) -> list[str]:
    """Return the names of the best:N trees of these sizes, larger ones replaced by `largest`."""
    return [f"best:{nodes}" for nodes in sorted({min(size, largest) for size in sizes})]


def promises(texts: Texts, records: Sequence[Sequence[Record]], times: Times, largest: int) -> list[dict[str, Any]]:
    """Return, for each tree size, accepted tokens, seconds of a round and speedup.

    Args:
        texts: Greedy texts decoded with the probes' trees.
        records: Records of the largest tree at every token of each prompt's text.
        times: The timing table's times of one sequence.
        largest: Nodes of the largest tree.
    """
    probes, found = {TreeSpec.parse(name).nodes: name for name in drafted(texts)}, list[dict[str, Any]]()
    around = [seconds(texts, name, "draft") + seconds(texts, name, "loop") for name in probes.values()]
    for name in names(SIZES, largest):
        nodes = TreeSpec.parse(name).nodes
        took = float(np.interp(np.log2(nodes), np.log2(list(probes)), around)) + seconds_at(times.verify, nodes + 1)
        together = Record.sum(record for each in records for record in begun(each, nodes))
        accepted = together.accepted_of(nodes)
        promised = {"accepted": accepted, "seconds": took, "speedup": (1 + accepted) * times.alone / took}
        found.append({"tree": name, "nodes": nodes, **promised})
    return found


def overall(texts: Texts, name: str) -> float:
    """Return the speedup if rounds differ: all tokens over all time, measured in plain rounds of the same prompt."""
    took = sum(each[name].stats.total / each[OFF].of("total") for each in texts)
    return sum(each[name].stats.emitted for each in texts) / took
