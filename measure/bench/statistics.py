"""Percentiles, speedups with their confidence intervals, and what was accepted at which depth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specbuild.runtime import SpeculationStats

PERCENTILES = (50, 95, 99)
RESAMPLES = 2000
CONFIDENCE = 0.95
Cost = tuple[float, int]  # seconds, and the tokens they gave


def latency(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """`mean_NAME_ms` and the percentiles, `p50_NAME_ms` …, as `vllm bench serve` names them; None of nothing."""
    values = np.asarray(seconds) * 1e3
    found: dict[str, float | None] = {"mean": float(values.mean()) if len(values) else None}
    for percentile in PERCENTILES:
        found[f"p{percentile}"] = float(np.percentile(values, percentile)) if len(values) else None
    return {f"{key}_{name}_ms": value for key, value in found.items()}


def speedup(baseline: Sequence[Cost], contender: Sequence[Cost], seed: int) -> dict[str, float | None]:
    """Seconds per token, the baseline's over the contender's, and the bounds of a 95 % confidence interval.

    Entry i of both is the same work. A percentile bootstrap (Efron 1979) draws such pairs with replacement, so what
    makes a prompt slow for both does not widen the interval. Without tokens `value` is None; of one pair no interval.
    """
    pairs = np.array([[*theirs, *ours] for theirs, ours in zip(baseline, contender, strict=True)], dtype=np.float64)
    pairs = pairs[(pairs[:, 1] > 0) & (pairs[:, 3] > 0)]  # neither has no token after the first
    count, generator = len(pairs), np.random.default_rng(seed)
    if count < 2:
        return {"value": _ratio(pairs) if count else None, "low": None, "high": None}
    drawn = [_ratio(pairs[generator.integers(count, size=count)]) for _ in range(RESAMPLES)]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, (tail, 1 - tail))
    return {"value": _ratio(pairs), "low": float(low), "high": float(high)}


def _ratio(pairs: Any) -> float:
    seconds, tokens, own_seconds, own_tokens = pairs.sum(axis=0)
    return float(seconds / tokens / (own_seconds / own_tokens))


def acceptance(requests: Sequence[SpeculationStats]) -> dict[str, Any] | None:
    """What became of drafted tokens, in the rounds that drafted; None where none did.

    - `mean_acceptance_length`: tokens a round, the bonus token included, over all rounds (micro);
      `macro_mean_acceptance_length`: the mean of the requests' own.
    - `acceptance_rate_per_position[k - 1]`: rounds that accepted k tokens or more, of those whose tree had k levels or
      more; a position is a depth, since one path of a tree is accepted. None where depths are not known (on a device).
    - `conditional_acceptance_rate[k - 1]`: rounds that accepted k or more, of all that accepted k − 1 or more, as
      SPEED-Bench counts (NVIDIA Model-Optimizer, examples/specdec_bench, metrics/acceptance_rate.py), there by tokens
      emitted, which are one more. A tree with fewer than k levels counts against position k.
    """
    drafted, total = [each for each in requests if each.num_spec_steps], SpeculationStats()
    for each in drafted:
        total.merge(each)
    if not drafted:
        return None
    accepted, levels = _at_least(total.acceptance_histogram), _at_least(total.depth_histogram)
    known = bool(levels) and levels[0] == total.num_spec_steps
    reached = accepted + [0] * (len(levels) - len(accepted))
    return total.to_dict() | {
        "macro_mean_acceptance_length": float(np.mean([each.mean_acceptance_length for each in drafted])),
        "acceptance_rate_per_position": [reached[k] / levels[k] for k in range(1, len(levels))] if known else None,
        "conditional_acceptance_rate": [accepted[k] / accepted[k - 1] for k in range(1, len(accepted))],
    }


def _at_least(histogram: Sequence[int]) -> list[int]:
    """[k]: how many counts were k or more."""
    return [sum(histogram[k:]) for k in range(len(histogram))]
