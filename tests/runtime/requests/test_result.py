"""Results and chunks are plain data: what is in them is told as JSON, what is not there is not told."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from specbuild.runtime import RequestMetrics, TokenLogprobs
from specbuild.runtime.errors import ExecutionError, PromptError
from specbuild.runtime.requests.result import Chunk, Result


def metrics() -> RequestMetrics:
    return RequestMetrics(7, 42, "chain:4", num_output_tokens=2, submitted=1.0, first_token=1.5, finished=2.5)


@pytest.mark.parametrize("reason", ["stop", "length", "cancelled", "deadline"])
def test_a_result_is_told_as_json(reason: str) -> None:
    told = Result("ab", [5, 6], reason, metrics()).to_dict()
    assert json.loads(json.dumps(told)) == {
        "text": "ab",
        "token_ids": [5, 6],
        "finish_reason": reason,
        "stop_reason": None,
        "metrics": metrics().to_dict(),
    }
    assert list(told) == ["text", "token_ids", "finish_reason", "stop_reason", "metrics"], (
        "what is read first comes first"
    )


def test_logprobs_are_told_where_they_were_asked_for() -> None:
    rows = np.log(np.array([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1]], dtype=np.float32))
    found = [TokenLogprobs.of(row, token, 2) for row, token in zip(rows, (0, 2), strict=True)]
    told = Result("ac", [0, 2], "length", metrics(), found).to_dict()
    assert told["logprobs"] == [each.to_dict() for each in found]
    json.dumps(told)
    assert Result("", [], "cancelled", metrics(), []).to_dict()["logprobs"] == [], "asked for, and none came"
    assert "logprobs" not in Result("", [], "cancelled", metrics(), None).to_dict()


@pytest.mark.parametrize("reason", ["\n", 7, None])
def test_why_it_stopped_is_told(reason: str | int | None) -> None:
    assert Result("a", [5], "stop", metrics(), stop_reason=reason).to_dict()["stop_reason"] == reason


def test_a_request_that_never_ran_has_no_metrics() -> None:
    told = Result("", [], "error", None, error=PromptError("the prompt is empty")).to_dict()
    assert (told["metrics"], told["error"]) == (None, "the prompt is empty")


@pytest.mark.parametrize("error", [PromptError("the prompt is empty"), ExecutionError("")])
def test_an_error_is_told_as_its_line(error: Any) -> None:
    told = Result("a", [5], "error", metrics(), error=error).to_dict()
    assert (told["error"], told["finish_reason"], told["token_ids"]) == (str(error), "error", [5])


def test_neither_a_result_nor_a_chunk_can_be_changed() -> None:
    result = Result("ab", [5, 6], "stop", metrics())
    chunk = Chunk(0, 1, "b", [6], None, result)
    for made, name in ((result, "text"), (result, "finish_reason"), (chunk, "result"), (chunk, "token_ids")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, name, None)
    assert chunk == Chunk(0, 1, "b", [6], None, Result("ab", [5, 6], "stop", metrics()))
    assert chunk != Chunk(0, 0, "b", [6], None, result)
