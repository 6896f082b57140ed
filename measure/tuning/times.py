"""What a round's parts take: steps of both models by nodes, alone and in rounds, and the loop's own part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Any

import numpy as np

from specbuild.measure.roofline import Steps
from specbuild.runtime.decoding.loop import Loop
from specbuild.runtime.drafting.pard import masks
from specbuild.runtime.speculation.tree import TreeSpec

from .decode import OFF, Texts, drafted, seconds

SIZES = (1, 2, 3, 4, 5, 6, 7, 9, 12, 17, 24, 33, 48, 64)  # a root and 1, 2, 4, 8, 16, 32 nodes are among them
FEW = (1, 2, 3, 5, 9, 17, 33, 64)  # of batches
CONTEXT = 256  # cached rows of measured steps, where the bundle's texts may be twice as long
Pairs = list[list[float]]  # nodes and seconds


def steps_of(loop: Loop, largest: int, longest: int) -> Steps:
    """The steps that are measured, where texts have `longest` tokens at most; slots must be free."""
    wanted: Iterable[int] = SIZES if loop.target.batch_size == 1 else FEW
    if buckets := loop.target.buckets:  # a step takes as long for all the nodes that it is padded from
        wanted = (size for bucket in buckets for size in (bucket, bucket + 1))
    sizes = sorted({1, *(min(size, largest) for size in wanted)})
    return Steps(loop, [(name, n) for n in sizes for name in ("target", "draft")], min(CONTEXT, longest // 2))


def pairs(steps: Steps) -> dict[str, Pairs]:
    """Nodes and seconds: of the target the shortest, whose shape `times_of` scales, of the draft medians."""
    found = {"verify": ("target", steps.by(min)), "draft": ("draft", steps.by(median))}
    return {name: [[n, each[m, n]] for m, n in each if m == model] for name, (model, each) in found.items()}


def times_of(
    found: Mapping[int, Mapping[str, Pairs]], texts: Texts, sampled: Texts, levels: float, together: bool = False
) -> dict[str, Any]:
    """The table by batch, of steps by batch and of texts one by one, the largest trees having `levels` on average.

    The loop's own times grow with the batch. `together`: the draft has one step for all levels.
    """
    factor, table = _in_rounds(found[1]["verify"], texts), dict[str, Any]()
    drafts = _draft_in_rounds(found[1]["draft"], texts, levels, together)
    greedy, other = (
        host_times([seconds(each, name, "loop") for name in (OFF, *drafted(each))], levels) for each in (texts, sampled)
    )
    for batch, steps in sorted(found.items()):
        verify = [[nodes, took * factor(nodes)] for nodes, took in steps["verify"]]
        own, others = ({name: took * batch for name, took in host.items()} for host in (greedy, other))
        draft = [[nodes, took * drafts] for nodes, took in steps["draft"]]
        table[str(batch)] = {"verify": verify, "draft": draft, **own, "sampled": others}
        if together and drafted(texts):
            table[str(batch)]["once"] = _of_nodes(draft, _first(texts, together))
    return table


def _in_rounds(steps: Pairs, texts: Texts) -> Callable[[float], float]:
    """How much longer a verification takes in a round, after the draft and the loop, than among others of its size."""
    looked_at = {1: OFF} | {TreeSpec.parse(name).nodes + 1: name for name in drafted(texts)}
    sizes, took = np.array(steps).T
    alone = np.interp(list(looked_at), sizes, took)
    ratios = np.array([seconds(texts, name, "verify") for name in looked_at.values()]) / alone
    return lambda nodes: float(np.interp(np.log2(nodes), np.log2(list(looked_at)), ratios))


def _draft_in_rounds(steps: Pairs, texts: Texts, levels: float, together: bool) -> float:
    """The same of the draft's steps, after the target: by the largest trees, which have so many levels on average."""
    if not drafted(texts):
        return 1.0
    largest = drafted(texts)[-1]
    alone = _of_nodes(steps, _first(texts, together))
    if not together:
        alone += (levels - 1) * _of_nodes(steps, TreeSpec.parse(largest).expand)
    return seconds(texts, largest, "draft") / alone


def _first(texts: Texts, together: bool) -> int:
    """Nodes of the draft's first step: it has to catch up by a token or two."""
    return 2 + (masks(TreeSpec.parse(drafted(texts)[-1]).depth) if together else 0)


def _of_nodes(steps: Pairs, nodes: int) -> float:
    sizes, took = np.array(steps).T
    return float(np.interp(nodes, sizes, took))


def host_times(loop: list[float], levels: float) -> dict[str, float]:
    """The loop's own seconds: of a plain round, of one with a tree, and of a level of the draft.

    By those of a plain round, and where a model drafts of rounds whose trees have one level, …, `levels`.
    """
    plain, short, long = loop[0], loop[min(1, len(loop) - 1)], loop[-1]
    level = max(long - short, 0.0) / max(levels - 1, 1.0)
    return {"plain": plain, "round": max(short - level, plain), "level": level}
