"""Usage, reasons of ends, and metrics of speculation, in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specbuild.runtime import Result, SpeculationStats
from specbuild.serve.options import SpecMetrics

_DETAILS = ("acceptance_histogram", "decisions")


def usage(
    prompt_tokens: int, completion_tokens: int, cached: int | None = None, results: Sequence[Result] = ()
) -> dict[str, Any]:
    """Return the token usage; `cached`: prompt tokens read from the prefix cache, if known; `results`: all samples."""
    told: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if cached is not None:
        told["prompt_tokens_details"] = {"cached_tokens": cached}
    counts = [result.metrics.speculative_decoding for result in results if result.metrics]
    if predicted := sum(each.num_prediction_tokens for each in counts):
        accepted = sum(each.num_accepted_prediction_tokens for each in counts)
        told["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": max(predicted - accepted, 0),
        }
    return told


def finish_reason(result: Result) -> tuple[str, str | int | None]:
    """Return OpenAI's finish_reason and vLLM's stop_reason; a text that ran out of time has finish_reason "length"."""
    if result.finish_reason == "stop":
        return "stop", result.stop_reason
    return "length", "deadline" if result.finish_reason == "deadline" else None


def metrics(results: Sequence[Result], how: SpecMetrics) -> dict[str, Any]:
    """Return the `metrics` of samples: the shortest TTFT, the longest wait and latency, and the sums of speculation."""
    own = [result.metrics for result in results if result.metrics]
    if how == "none" or not own:
        return {}
    total = SpeculationStats()
    for each in own:
        total.merge(each.speculative_decoding)
    told = total.to_dict()
    if how == "summary":
        told = {name: value for name, value in told.items() if name not in _DETAILS}
    first = [each.ttft for each in own if each.first_token is not None]
    return {
        "ttft": min(first, default=None),
        "queue_time": max(each.queue_time for each in own),
        "e2el": max(each.e2el for each in own),
        "speculative_decoding": told,
    }
