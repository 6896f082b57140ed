"""Errors of requests as an HTTP status and a body of OpenAI's shape."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from starlette.responses import Response
from typing_extensions import TypedDict

from specbuild.runtime.errors import EngineClosedError, InputError, PromptError, QueueFullError, SpecbuildError

_OURS = (408, 500, 503)  # statuses of the server's faults; of the others, but for 429, the request is to blame
_TOKENS = ("queued_tokens", "tokens_per_minute")  # codes of 429 that tokens are the cause of, not requests
STATUSES = (400, 401, 404, 405, 408, 413, 429, 431, 500, 503)  # error statuses of text-generation requests
RETRY = 1  # seconds, if no better estimate is known


class ErrorDetail(TypedDict):
    """The description of an error. `param` names the field that is wrong; `code` is a fixed word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """The body of every error response."""

    error: ErrorDetail


def faults(body: Any = ErrorBody, statuses: Sequence[int] = STATUSES) -> dict[int | str, dict[str, Any]]:
    """Return what OpenAPI says of a route's error responses, which have this body."""
    return {status: {"model": body} for status in statuses}


class ApiError(Exception):
    """Ends a request with this status; `retry_after`: seconds after which the client may try again."""

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

    def rename(self, ours: str, theirs: str) -> None:
        """Give the field by the caller's name, also where the message begins with ours."""
        self.param = theirs
        if self.message.startswith(ours):
            self.message = theirs + self.message.removeprefix(ours)

    def body(self) -> ErrorBody:
        """Return OpenAI's error object."""
        kind = "server_error" if self.status in _OURS else "invalid_request_error"
        if self.status == 429:
            kind = "tokens" if self.code in _TOKENS else "requests"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the error response."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})

    def response(self) -> Response:
        """Return the whole error response."""
        return json_response(self.body(), self.status, self.headers)


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response; in ASCII if it repeats a lone surrogate, which UTF-8 cannot encode."""
    try:
        text = msgspec.json.encode(body)
    except UnicodeEncodeError:
        text = json.dumps(body).encode()
    return Response(text, status, headers, media_type="application/json")


@contextmanager
def blaming(param: str | None, ours: str | None = None) -> Iterator[None]:
    """Turn what the runtime refuses meanwhile into the error of this field; `ours`: the runtime's name of it."""
    try:
        yield
    except InputError as error:
        refused = api_error(error, param)
        if param and ours:
            refused.rename(ours, param)
        raise refused from None


@contextmanager
def renaming(name: Callable[[str], str]) -> Iterator[None]:
    """Name fields in errors as the caller did: `name` gives the caller's name of a field in a translated request."""
    try:
        yield
    except ApiError as error:
        if ours := error.param:
            error.rename(ours, name(ours))
        raise


def api_error(error: BaseException, param: str | None = None) -> ApiError:
    """Map any exception to an ApiError; apart from ApiErrors, only SpecbuildErrors show clients their message.

    `param`: the field that is to blame if the runtime has refused an input.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PromptError):
        long = "tokens" in str(error) and ("shorten" in str(error))
        return ApiError(400, str(error), param=param or "prompt", code="context_length_exceeded" if long else None)
    if isinstance(error, InputError):
        return ApiError(400, str(error), param=param)
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full")
    if isinstance(error, EngineClosedError):
        return ApiError(503, "the server is shutting down: send the request to another one", code="draining")
    if isinstance(error, SpecbuildError):
        return ApiError(500, str(error))
    return ApiError(500, f"a bug in specbuild, {type(error).__name__}: the server's log has more")
