"""Results and chunks are plain data: what is in them is told as JSON, what is not there is not told."""

from __future__ import annotations

import json

import numpy as np
import pytest

from specbuild.runtime import RequestMetrics, TokenLogprobs
from specbuild.runtime.errors import PromptError
from specbuild.runtime.requests.result import Result


def metrics() -> RequestMetrics:
    return RequestMetrics(7, 42, "chain:4", num_output_tokens=2, submitted=1.0, first_token=1.5, finished=2.5)


@pytest.mark.parametrize(("reason", "stop"), [("stop", "\n"), ("stop", 7), ("length", None)])
def test_a_result_is_told_as_json(reason: str, stop: str | int | None) -> None:
    told = Result("ab", [5, 6], reason, metrics(), stop_reason=stop).to_dict()
    whole = {"text": "ab", "token_ids": [5, 6], "finish_reason": reason, "stop_reason": stop}
    assert json.loads(json.dumps(told)) == whole | {"metrics": metrics().to_dict()}


def test_logprobs_are_told_where_they_were_asked_for() -> None:
    rows = np.log(np.array([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1]], dtype=np.float32))
    found = [TokenLogprobs.of(row, token, 2) for row, token in zip(rows, (0, 2), strict=True)]
    told = Result("ac", [0, 2], "length", metrics(), found).to_dict()
    assert told["logprobs"] == [each.to_dict() for each in found]
    json.dumps(told)
    assert Result("", [], "cancelled", metrics(), []).to_dict()["logprobs"] == [], "asked for, and none came"
    assert "logprobs" not in Result("", [], "cancelled", metrics(), None).to_dict()


def test_an_error_is_told_as_its_line() -> None:
    told = Result("", [], "error", None, error=PromptError("the prompt is empty")).to_dict()
    assert (told["metrics"], told["error"]) == (None, "the prompt is empty")
