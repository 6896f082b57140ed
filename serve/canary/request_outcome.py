"""Reads from an ended request what a canary compares."""

from __future__ import annotations

from specbuild.serve.request.generation import Generation

_FAULTS = (408, 429)  # statuses that count as errors besides 500 and above: time ran out, or the queue was full


def outcome_of(generation: Generation) -> dict[str, float] | None:
    """Return a request's values by name; None if its client spoiled or left it, or a drain ended it.

    `errors` is 1 or 0; if it is 1, there are no other values. Means over samples: `ttft` in seconds, and
    `tokens_per_second` after the first token.
    """
    status = generation.status
    if status in _FAULTS or status >= 500:
        return None if generation.served.admission.draining else {"errors": 1.0}
    results = [result.metrics for result in generation.results.values() if result.metrics]
    own = [each for each in results if each.first_token is not None]
    if status != 200 or not generation.results:
        return None
    found = {"errors": 0.0}
    if own:
        found["ttft"] = sum(each.ttft for each in own) / len(own)
    if paces := [each.tpot for each in own if each.num_output_tokens > 1 and each.tpot > 0]:
        found["tokens_per_second"] = len(paces) / sum(paces)
    return found
