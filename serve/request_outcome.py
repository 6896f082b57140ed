"""Reads from an ended request how it was decoded."""

from __future__ import annotations

from collections.abc import Mapping

from specbuild.runtime import RequestMetrics, Result
from specbuild.serve.request.generation import Generation

_FAULTS = (408, 429)  # statuses that count as errors besides 500 and above: time ran out, or the queue was full


def observed(generation: Generation) -> dict[str, float] | None:
    """Return a request's values by name; None if its client spoiled or left it, or a drain ended it.

    `errors` is 1 or 0; if it is 1, there are no other values. Means over samples: `ttft`, `tpot`, `e2el` in seconds,
    `tokens`, and shares: `cut` (ended by a limit), `invalid` (structured outputs that did not end by themselves),
    `acceptance` (of drafted tokens).
    """
    status = generation.status
    if status in _FAULTS or status >= 500:
        return None if generation.served.admission.draining else {"errors": 1.0}
    results = list(generation.results.values())
    if status != 200 or not results:
        return None
    return {"errors": 0.0, **_ends(results, generation.params.structured_outputs is not None), **_metrics(results)}


def _ends(results: list[Result], structured: bool) -> dict[str, float]:
    cut = sum(result.finish_reason != "stop" for result in results) / len(results)
    tokens = sum(len(result.token_ids) for result in results) / len(results)
    return {"tokens": tokens, "cut": cut, **({"invalid": cut} if structured else {})}


def _metrics(results: list[Result]) -> dict[str, float]:
    own = [result.metrics for result in results if result.metrics and result.metrics.first_token is not None]
    times: Mapping[str, list[float]] = {
        "ttft": [each.ttft for each in own],
        "tpot": [each.tpot for each in own if each.num_output_tokens > 1],
        "e2el": [each.e2el for each in own],
    }
    return {name: sum(each) / len(each) for name, each in times.items() if each} | _acceptance(own)


def _acceptance(own: list[RequestMetrics]) -> dict[str, float]:
    stats = [each.speculative_decoding for each in own]
    drafted = sum(each.num_draft_tokens for each in stats)
    if not drafted:
        return {}
    return {"acceptance": sum(each.num_accepted_draft_tokens for each in stats) / drafted}
