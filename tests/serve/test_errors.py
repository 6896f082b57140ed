"""Errors: OpenAI's shape, the right status, nothing of ours that is nobody's business."""

import json

import pytest

from specbuild.runtime import errors
from specbuild.serve.errors import ApiError, api_error

TOO_LONG = "the prompt has 600 tokens, this model takes 512 with at least one of output: shorten it"


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (errors.PromptError(TOO_LONG), 400, "invalid_request_error", "context_length_exceeded"),
        (errors.OptionError("top_k must be"), 400, "invalid_request_error", None),
        (errors.QueueFullError("full"), 429, "requests", "queue_full"),
        (errors.EngineClosedError("closed"), 503, "server_error", "draining"),
        (errors.ExecutionError("NaN"), 500, "server_error", None),
        (KeyError("secret"), 500, "server_error", None),
        (
            ApiError(404, "no \ud800", param="\ud800", code="model_not_found"),
            404,
            "invalid_request_error",
            "model_not_found",
        ),
        (ApiError(401, "give a key"), 401, "invalid_request_error", None),
    ],
)
def test_status_and_shape(error, status, kind, code):
    response = api_error(error).response()
    told = json.loads(bytes(response.body))["error"]
    assert (response.status_code, told["type"], told["code"]) == (status, kind, code)
    assert not isinstance(error, ApiError) or told["param"] == error.param, "half a character is sent escaped"
    assert ("retry-after" in response.headers) == (status in (429, 503))
    assert ("www-authenticate" in response.headers) == (status == 401)
    assert "secret" not in told["message"]
