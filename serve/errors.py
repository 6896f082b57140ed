"""What goes wrong with a request, as a status and a body of OpenAI's shape."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from typing_extensions import TypedDict

from specbuild.runtime.errors import EngineClosedError, InputError, PromptError, QueueFullError, SpecbuildError

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "service_unavailable_error",
}
RETRY = 1  # seconds, where nothing better is known


class ErrorDetail(TypedDict):
    """`param`: the field that is wrong. `code`: a word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """Every response that is no success."""

    error: ErrorDetail


class ApiError(Exception):
    """A request ends with this status; `retry_after`: seconds after which it may be tried again."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = RETRY if retry_after is None and status in (429, 503) else retry_after

    def body(self) -> ErrorBody:
        """OpenAI's error object."""
        kind = KINDS.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The whole response."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return json_response(self.body(), self.status, headers)


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response; in ASCII where a client has put half a surrogate pair into a name that it repeats."""
    try:
        text = msgspec.json.encode(body)
    except UnicodeEncodeError:
        text = json.dumps(body).encode()
    return Response(text, status, headers, media_type="application/json")


def api_error(error: BaseException) -> ApiError:
    """What any exception means to a client: nothing of ours but SpecbuildErrors shows its message."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PromptError):
        long = "tokens" in str(error) and ("shorten" in str(error))
        return ApiError(400, str(error), param="prompt", code="context_length_exceeded" if long else None)
    if isinstance(error, InputError):
        return ApiError(400, str(error))
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full")
    if isinstance(error, EngineClosedError):
        return ApiError(503, "the server is shutting down: send the request to another one", code="draining")
    if isinstance(error, SpecbuildError):
        return ApiError(500, str(error))
    return ApiError(500, f"a bug in specbuild, {type(error).__name__}: the server's log has more")
