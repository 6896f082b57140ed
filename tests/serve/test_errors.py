"""Errors: OpenAI's shape, the right status, nothing of ours that is nobody's business."""

from __future__ import annotations

import json

import pytest

from specbuild.runtime.errors import (
    EngineClosedError,
    ExecutionError,
    OptionError,
    PromptError,
    QueueFullError,
    SpecbuildError,
)
from specbuild.serve.errors import ApiError, api_error


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (PromptError("the prompt is empty"), 400, "invalid_request_error"),
        (OptionError("top_k must be"), 400, "invalid_request_error"),
        (QueueFullError("full"), 429, "rate_limit_error"),
        (EngineClosedError("closed"), 503, "service_unavailable_error"),
        (ExecutionError("NaN"), 500, "server_error"),
        (SpecbuildError("?"), 500, "server_error"),
        (KeyError("secret"), 500, "server_error"),
        (ApiError(404, "no such model", param="model", code="model_not_found"), 404, "not_found_error"),
    ],
)
def test_status_and_shape(error: Exception, status: int, kind: str) -> None:
    told = api_error(error)
    response = told.response()
    body = json.loads(bytes(response.body))
    assert (response.status_code, body["error"]["type"]) == (status, kind)
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert ("retry-after" in response.headers) == (status in (429, 503))
    assert "secret" not in body["error"]["message"]


def test_a_prompt_that_is_too_long_has_openais_code() -> None:
    error = PromptError("the prompt has 600 tokens, this model takes 512 with at least one of output: shorten it")
    assert api_error(error).code == "context_length_exceeded"


def test_half_a_surrogate_pair_in_a_name_is_sent_escaped() -> None:
    body = bytes(ApiError(404, "no \ud800", param="\ud800").response().body)
    assert json.loads(body)["error"]["param"] == "\ud800"


def test_no_key_asks_for_one() -> None:
    assert ApiError(401, "give a key").response().headers["www-authenticate"] == "Bearer"
