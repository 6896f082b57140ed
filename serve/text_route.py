"""Routes that answer with a text: each API's path, body, translation and format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from .errors import renaming
from .handle_request import Formats, answer
from .openai.chat import ChatFormat
from .openai.completions import CompletionFormat
from .openai.formats import Format
from .request.body import Body, read, takes
from .request.fields import ChatRequest, CompletionRequest, Sampling
from .service import Service

_STREAM = {"text/event-stream": dict[str, Any]()}  # OpenAPI 3.1 has no schema of events


def same(given: Any) -> Any:
    """Return what is given: a body that needs no translation, or a field's name."""
    return given


def replies(model: Any = dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    """Return what OpenAPI says of a response that is whole or a stream."""
    return {200: {"model": model, "content": _STREAM}}


@dataclass(frozen=True, slots=True)
class TextRoute:
    """A route that answers with a text.

    Args:
        path: The route's path.
        body: Type of its body.
        form: Makes the format of its response.
        request: Translates the body into a chat or a completion.
        field_name: Returns the body's name of a translated field.
    """

    path: str
    body: type[Body]
    form: Formats[Format]
    request: Callable[[Any], Sampling] = same
    field_name: Callable[[str], str] = same

    def add(self, router: APIRouter, service: Service) -> None:
        """Add the route to a router."""

        @router.post(self.path, responses=replies(), openapi_extra=takes(self.body))
        async def create(request: Request) -> Response:
            return await self.answer(service, request, await read(request, self.body, service.refuses_unknown))

    async def answer(self, service: Service, request: Request, body: Body) -> Response:
        """Answer a request with this body; see `answer`."""
        with renaming(self.field_name):
            return await answer(service, request, self.request(body), self.form)


CHATS = TextRoute("/v1/chat/completions", ChatRequest, ChatFormat)
COMPLETIONS = TextRoute("/v1/completions", CompletionRequest, CompletionFormat)
