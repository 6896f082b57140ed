"""Latency percentiles, speedups with confidence intervals, and acceptance rates by depth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specbuild.runtime import SpeculationStats

PERCENTILES = (50, 95, 99)
RESAMPLES = 2000
CONFIDENCE = 0.95
Cost = tuple[float, int]  # seconds, and the tokens that came in them


def latency(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """Return `mean_NAME_ms` and percentiles `p50_NAME_ms` …, named as in `vllm bench serve`; None without values."""
    values = np.asarray(seconds) * 1e3
    found: dict[str, float | None] = {"mean": float(values.mean()) if len(values) else None}
    for percentile in PERCENTILES:
        found[f"p{percentile}"] = float(np.percentile(values, percentile)) if len(values) else None
    return {f"{key}_{name}_ms": value for key, value in found.items()}


def speedup(baseline: Sequence[Cost], contender: Sequence[Cost], seed: int) -> dict[str, float | None]:
    """Return the baseline's seconds per token over the contender's, with the bounds of a 95 % confidence interval.

    A percentile bootstrap (Efron 1979) draws pairs of entries with replacement, so prompts that are slow for both do
    not widen the interval. `value` is None without tokens; the bounds are None with fewer than two pairs.

    Args:
        baseline: The baseline's costs.
        contender: The contender's costs; entry i is the same work as the baseline's entry i.
        seed: Seed of the bootstrap.
    """
    pairs = np.array([[*theirs, *ours] for theirs, ours in zip(baseline, contender, strict=True)], dtype=np.float64)
    pairs = pairs[(pairs[:, 1] > 0) & (pairs[:, 3] > 0)]  # both have tokens to divide by
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
    """Return statistics of the rounds that drafted; None if none did.

    - `mean_acceptance_length`: tokens per round, the bonus token included, over all rounds (micro);
      `macro_mean_acceptance_length`: the mean of the requests' own means.
    - `acceptance_rate_per_position[k - 1]`: the share of rounds that accepted at least k tokens among those whose tree
      had at least k levels. A position is a depth, since one path of a tree is accepted. None if depths are unknown (on
      a device).
    - `conditional_acceptance_rate[k - 1]`: the share of rounds that accepted at least k tokens among those that
      accepted at least k − 1, as in SPEED-Bench (NVIDIA Model-Optimizer, examples/specdec_bench,
      metrics/acceptance_rate.py), which counts emitted tokens, one more. A tree with fewer than k levels counts against
      position k.
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
    """Return, at index k, how many counts were at least k."""
    return [sum(histogram[k:]) for k in range(len(histogram))]
