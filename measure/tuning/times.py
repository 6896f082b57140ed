"""The times of a round's parts: steps of both models by nodes, alone and within rounds, and the loop's own time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Any

import numpy as np

from specbuild.measure.roofline import Steps
from specbuild.runtime.decoding.loop import Loop
from specbuild.runtime.speculation.tree import TreeSpec

from .decode import OFF, Texts, drafted, seconds

# A root with 1, 2, 4, 8, 16 and 32 nodes, and whole tiles of 8 rows, after which a step takes longer.
SIZES = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 33, 48, 64)
FEW = (1, 2, 3, 5, 8, 9, 17, 33, 64)  # for batches
CONTEXT = 256  # maximum cached rows of measured steps; at most half of the bundle's max_seq_len
Pairs = list[list[float]]  # [nodes, seconds] each


def steps_of(loop: Loop, largest: int, longest: int) -> Steps:
    """Return the steps to measure.

    Args:
        loop: The loop whose models run; its slots must be free.
        largest: The maximum nodes of a step, root included.
        longest: The maximum tokens of a text.
    """
    wanted: Iterable[int] = SIZES if loop.target.batch_size == 1 else FEW
    if buckets := loop.target.buckets:  # steps are padded to buckets, so the time changes only past each bucket
        wanted = (size for bucket in buckets for size in (bucket, bucket + 1))
    sizes = sorted({1, *(min(size, largest) for size in wanted)})
    return Steps(loop, [(name, n) for n in sizes for name in ("target", "draft")], min(CONTEXT, longest // 2))


def pairs(steps: Steps) -> dict[str, Pairs]:
    """Return nodes and seconds of each model's steps ("verify" and "draft").

    The target's are minima, which `times_of` scales to those in rounds; the draft's are medians.
    """
    found = {"verify": ("target", steps.by(min)), "draft": ("draft", steps.by(median))}
    return {name: [[n, each[m, n]] for m, n in each if m == model] for name, (model, each) in found.items()}


def times_of(
    found: Mapping[int, Mapping[str, Pairs]], texts: Texts, sampled: Texts, levels: float, together: bool = False
) -> dict[str, Any]:
    """Return the timing table's `times` by batch size. The loop's own times are taken to grow with the batch.

    Args:
        found: The steps of each batch size; see `pairs`.
        texts: Texts decoded greedily one by one.
        sampled: Texts sampled one by one.
        levels: Mean number of levels of the largest trees.
        together: Whether the draft predicts all levels in one step.
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
    """Return, by nodes, how much longer a verification takes in a round, after draft and loop, than in `Steps`."""
    looked_at = {1: OFF} | {TreeSpec.parse(name).nodes + 1: name for name in drafted(texts)}
    sizes, took = np.array(steps).T
    alone = np.interp(list(looked_at), sizes, took)
    ratios = np.array([seconds(texts, name, "verify") for name in looked_at.values()]) / alone
    return lambda nodes: float(np.interp(np.log2(nodes), np.log2(list(looked_at)), ratios))


def _draft_in_rounds(steps: Pairs, texts: Texts, levels: float, together: bool) -> float:
    """Return the same factor for the draft's steps, from the largest trees, which have `levels` levels on average."""
    if not drafted(texts):
        return 1.0
    largest = drafted(texts)[-1]
    alone = _of_nodes(steps, _first(texts, together))
    if not together:
        alone += (levels - 1) * _of_nodes(steps, TreeSpec.parse(largest).expand)
    return seconds(texts, largest, "draft") / alone


def _first(texts: Texts, together: bool) -> int:
    """Return the nodes of the draft's first step, which first reads the one or two tokens emitted since its last."""
    return 1 + (TreeSpec.parse(drafted(texts)[-1]).depth if together else 1)  # PARD's masks, one fewer than levels


def _of_nodes(steps: Pairs, nodes: int) -> float:
    sizes, took = np.array(steps).T
    return float(np.interp(nodes, sizes, took))


def host_times(loop: list[float], levels: float) -> dict[str, float]:
    """Return the loop's own seconds in a plain round, in a round with a tree, and for each level of the draft.

    Args:
        loop: The loop's seconds in a plain round, then with a draft model in rounds with trees of one level, …,
            `levels` levels.
        levels: Mean number of levels of the largest trees.
    """
    plain, short, long = loop[0], loop[min(1, len(loop) - 1)], loop[-1]
    level = max(long - short, 0.0) / max(levels - 1, 1.0)
    return {"plain": plain, "round": max(short - level, plain), "level": level}
