"""What trees of each size promise over plain decoding, by the timing table, and what they brought."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from specbuild.runtime.speculation.timings import Times
from specbuild.runtime.speculation.tree import TreeSpec

from .chances import Record, begun
from .decode import OFF, Texts, drafted, seconds
from .sequoia import best_tree

SIZES = (1, 2, 4, 8, 16, 32)  # trees that are held against each other
PROBES = (1, 4, 32)  # those whose rounds are looked at: between them cost grows with the logarithm of the nodes


def names(sizes: Sequence[int], largest: int) -> list[str]:
    """Trees of these sizes, as drafted, and of the largest in place of those that do not fit."""
    return [f"best:{nodes}" for nodes in sorted({min(size, largest) for size in sizes})]


def promises(texts: Texts, records: Sequence[Sequence[Record]], times: Times, largest: int) -> list[dict[str, Any]]:
    """Of each size. `texts`: of the probes; `records`: of the largest trees, at every token of each prompt's text.

    Beside it the best tree of as many nodes whose shape is fixed: Sequoia's.
    """
    probes, found = {TreeSpec.parse(name).nodes: name for name in drafted(texts)}, list[dict[str, Any]]()
    around = [seconds(texts, name, "draft") + seconds(texts, name, "loop") for name in probes.values()]
    for name in names(SIZES, largest):
        nodes = TreeSpec.parse(name).nodes
        took = float(np.interp(np.log2(nodes), np.log2(list(probes)), around)) + float(times.verify[nodes + 1])
        together = Record.sum(record for each in records for record in begun(each, nodes))
        accepted, (fixed, parents) = together.accepted_of(nodes), best_tree(together.by_rank(), nodes)
        promised = {"accepted": accepted, "seconds": took, "speedup": (1 + accepted) * times.alone / took}
        found.append({"tree": name, "nodes": nodes, **promised, "sequoia": {"accepted": fixed, "parents": parents}})
    return found


def measured(texts: Texts, name: str) -> float:
    """A tree's speedup: tokens of a round by its seconds, in plain rounds of the same prompt, the median of all."""
    runs = [each[name].stats for each in texts]
    took = median(each[name].of("total") / each[OFF].of("total") for each in texts)
    return sum(run.emitted for run in runs) / sum(run.rounds for run in runs) / took


def overall(texts: Texts, name: str) -> float:
    """The speedup where rounds differ: all prompts' tokens by their seconds, in plain rounds of the same prompt."""
    took = sum(each[name].stats.total / each[OFF].of("total") for each in texts)
    return sum(each[name].stats.emitted for each in texts) / took
