"""What a round's parts take: steps of both models by nodes, measured in turns, and the loop's own part."""

from __future__ import annotations

from dataclasses import astuple
from statistics import median

from ...runtime.loop import Loop
from ...runtime.metrics import RunStats
from ...runtime.roofline import timed_step

SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 56, 63)
REPEAT = 15
Pairs = list[list[float]]  # nodes and seconds


def step_times(loop: Loop, largest: int, rows: int, repeat: int = REPEAT) -> dict[str, Pairs]:
    """Median seconds of a step of all slots by nodes of each, up to `largest`, after `rows` cached rows.

    All sizes of both models take turns, so whatever else the machine does meets them all. Slots must be free.
    """
    executors = {"verify": loop.target} | ({"draft": loop.draft_executor} if loop.draft_executor else {})
    sizes = sorted({*(size for size in SIZES if size < largest), largest})
    runs = {(name, size): timed_step(each, size, rows) for size in sizes for name, each in executors.items()}
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in runs}
    for _ in range(repeat + 1):  # the first is warm-up
        for key, run in runs.items():
            seconds[key].append(run())
    for slot in range(loop.target.batch_size):
        loop.release(slot)
    found = {(name, size): median(times[1:]) for (name, size), times in seconds.items()}
    return {name: [[n, found[name, n]] for n in sizes if (name, n) in found] for name in ("verify", "draft")}


def host_times(plain: RunStats, short: RunStats, long: RunStats, levels: int) -> dict[str, float]:
    """The loop's own seconds: of a plain round, of one with a tree, and of a level of the draft.

    Runs of plain decoding, of trees of one level, and of trees of `levels`, in which nearly all rounds drafted.
    """
    each = [max(run.total - run.verify - run.draft, 0.0) / max(run.rounds, 1) for run in (plain, short, long)]
    level = max(each[2] - each[1], 0.0) / max(levels - 1, 1)
    return {"plain": each[0], "round": max(each[1] - level, 0.0), "level": level}


def plus(one: RunStats, other: RunStats) -> RunStats:
    """Both together."""
    return RunStats(*(a + b for a, b in zip(astuple(one), astuple(other), strict=True)))


def copy(stats: RunStats) -> RunStats:
    """Statistics as they are now."""
    return RunStats(*astuple(stats))
