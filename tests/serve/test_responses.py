"""Responses: OpenAI's reasons, and speculation's counts in brief and in detail."""

from __future__ import annotations

import pytest

from specbuild.runtime import RequestMetrics, Result, SpeculationStats
from specbuild.serve.responses import finish_reason, metrics, usage


@pytest.mark.parametrize(
    ("reason", "stop", "told"),
    [
        ("stop", "\n", ("stop", "\n")),
        ("stop", None, ("stop", None)),
        ("length", None, ("length", None)),
        ("deadline", None, ("length", "deadline")),
    ],
)
def test_reasons(reason: str, stop: str | None, told: tuple[str, str | None]) -> None:
    assert finish_reason(Result("", [], reason, None, stop_reason=stop)) == told


def test_usage_adds_up() -> None:
    assert usage(3, 4) == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert usage(3, 4, 2)["prompt_tokens_details"] == {"cached_tokens": 2}


def of(ttft: float, queue: float) -> Result:
    stats = SpeculationStats()
    stats.record(4, 2)
    own = RequestMetrics(3, 1, "auto", submitted=0.0, started=queue, first_token=ttft, finished=9.0)
    own.speculative_decoding = stats
    return Result("", [1], "stop", own)


def test_metrics_of_several_samples() -> None:
    told = metrics([of(1, 0.5), of(2, 1.5)], "summary")
    assert (told["ttft"], told["queue_time"], told["e2el"]) == (1, 1.5, 9.0)
    assert told["speculative_decoding"]["num_draft_tokens"] == 8
    assert "acceptance_histogram" not in told["speculative_decoding"]
    assert metrics([of(1, 0)], "detailed")["speculative_decoding"]["acceptance_histogram"] == [0, 0, 1]
    assert metrics([of(1, 0)], "none") == metrics([Result("", [], "error", None)], "detailed") == {}
