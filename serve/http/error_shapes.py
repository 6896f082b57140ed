"""An error in the shape of the API that was called: OpenAI's, Anthropic's, or text-generation-inference's."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Scope

from specbuild.serve.anthropic import messages
from specbuild.serve.clouds import tgi
from specbuild.serve.errors import ApiError, json_response


def refusal(scope: Scope, path: str, error: ApiError) -> Response:
    """Return the response of an error; `path`: the request's, below the root path."""
    if path in tgi.PATHS and scope["method"] == "POST":
        return json_response(tgi.error_body(error), error.status, error.headers)
    if path.startswith(messages.PATH):
        return json_response(messages.error_body(error), error.status, error.headers)
    return error.response()
