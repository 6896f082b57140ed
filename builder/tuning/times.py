"""What a round's parts take: steps of both models by nodes, and the loop's own part."""

from __future__ import annotations

from ...runtime.loop import Loop
from ...runtime.metrics import RunStats
from ...runtime.roofline import step_seconds

SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 56, 63)
REPEAT = 15
Pairs = list[list[float]]  # nodes and seconds


def step_times(loop: Loop, largest: int, rows: int, repeat: int = REPEAT) -> dict[str, Pairs]:
    """Median seconds of a step of all slots by nodes of each, up to `largest`, after `rows` cached rows.

    Slots must be free.
    """
    sizes = sorted({*(size for size in SIZES if size < largest), largest})
    models = {"target": "verify"} | ({"draft": "draft"} if loop.draft_executor else {})
    found = step_seconds(loop, [(model, size) for size in sizes for model in models], rows, repeat)
    pairs: dict[str, Pairs] = {"verify": [], "draft": []}
    for (model, size), seconds in found.items():
        pairs[models[model]].append([size, seconds])
    return pairs


def host_times(plain: RunStats, short: RunStats, long: RunStats, levels: int) -> dict[str, float]:
    """The loop's own seconds: of a plain round, of one with a tree, and of a level of the draft.

    Runs of plain decoding, of trees of one level, and of trees of `levels`, in which nearly all rounds drafted.
    """
    each = [max(run.total - run.verify - run.draft, 0.0) / max(run.rounds, 1) for run in (plain, short, long)]
    level = max(each[2] - each[1], 0.0) / max(levels - 1, 1)
    return {"plain": each[0], "round": max(each[1] - level, 0.0), "level": level}
