"""Says in plain words whether a draft is worth it, and how good it would have to be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from specbuild.runtime.speculation.goodput import MARGIN
from specbuild.runtime.speculation.timing_table import Times
from specbuild.runtime.speculation.tree import BEST_DEPTH

_GRID = np.linspace(0.0, 1.0, 1001)


def needed(times: Times) -> float | None:
    """Return the least acceptance rate per token at which a chain of the best length beats plain decoding.

    None if even drafts that are always accepted would not. The expected tokens per round are those of arXiv 2211.17192.
    """
    gains = np.zeros_like(_GRID)
    for depth in range(1, BEST_DEPTH + 1):
        seconds = times.once + depth * (times.draft[1] + times.level) + times.verify[depth + 1] + times.round
        gains = np.maximum(gains, (_GRID[:, None] ** np.arange(depth + 1)).sum(1) * times.alone / seconds)
    return float(_GRID[gains > 1][0]) if gains[-1] > 1 else None


def judge(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `verdict` on what `measure.weigh` found, and the `reasons` for it, one line each.

    A draft is worth it if a tree promises to be faster than plain decoding by MARGIN, as `auto` requires to draft.
    """
    measured = found["temperatures"]
    good = [each for each in measured if each["speedup"] >= 1 + MARGIN]
    verdict = "not worth it on this machine"
    if good:
        which = " and ".join(f"{each['temperature']:g}" for each in good)
        verdict = "worth it on this machine" + ("" if len(good) == len(measured) else f" at temperature {which} alone")
    at = [f"at temperature {each['temperature']:g}" for each in measured]
    every = list(zip(measured, at, strict=True))
    trees = [f"{each['speedup']:.2f}× {where} ({each['tree']})" for each, where in every]
    auto = [f"{each['auto']:.2f}× {where} ({each['lookup']:.2f}× without the draft)" for each, where in every]
    reasons = [
        f"its trees promise, over plain decoding, {', '.join(trees)}; {1 + MARGIN:g}× is what makes auto draft",
        f"auto, which also continues what a text repeats, was {', '.join(auto)}",
    ]
    cost, least = f"a step of the draft costs {found['step_ratio']:.2f} of the target's", found["needed"]
    if least is None:
        reasons.append(f"{cost}: no acceptance would make up for that here")
    else:
        first = [f"{each['accepted'][0]:.0%} {where}" for each, where in every]
        reasons.append(
            f"{cost}: more than {least:.0%} of its tokens have to come true for a gain, {' and '.join(first)} do"
        )
    if (covered := found["vocabulary"]["covered"]) < 1:
        reasons.append(f"its vocabulary has {covered:.0%} of the prompts' tokens, and drafts no others")
    return {"verdict": verdict, "reasons": reasons}
