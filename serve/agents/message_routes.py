"""The routes of /v1/messages, whose errors have Anthropic's shape, those of the gate excepted."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response

from specbuild.serve import chat, tools
from specbuild.serve.answer import Service, answer
from specbuild.serve.errors import ApiError, api_error, field_error, json_response
from specbuild.serve.fields import check_known
from specbuild.serve.generation import ClientGoneError

from .message_fields import CountRequest, MessagesRequest
from .messages import MessageFormat, chat_of, error_body

_STREAM = {"text/event-stream": {"schema": {"type": "string"}}}
_FAULTS: dict[int | str, dict[str, Any]] = {
    status: {"model": dict[str, Any]} for status in (400, 401, 404, 405, 408, 413, 429, 431, 500, 503)
}
_Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class _Route(APIRoute):
    """Tells what goes wrong in Anthropic's shape."""

    def get_route_handler(self) -> _Handler:
        """See `APIRoute`."""
        inner = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await inner(request)
            except ClientGoneError:
                raise
            except RequestValidationError as error:
                told = field_error(error.errors(), request.headers.get("content-type", ""))
            except HTTPException as error:  # a body that is no text
                told = ApiError(error.status_code, str(error.detail))
            except Exception as error:
                told = api_error(error)
                if told.status >= 500 and not isinstance(error, ApiError):
                    request.state.told["error"] = f"{type(error).__name__}: {error}"
            request.state.told.setdefault("error", told.message)
            return json_response(error_body(told), told.status, told.headers)

        return handle


def routes(service: Service) -> APIRouter:
    """What Anthropic's clients call."""
    router = APIRouter(responses=_FAULTS, route_class=_Route)

    @router.post("/v1/messages", responses={200: {"model": dict[str, Any], "content": _STREAM}})
    async def create_message(request: Request, body: MessagesRequest) -> Response:
        _known(service, body)
        return await answer(service, request, chat_of(body), MessageFormat, 1)

    @router.post("/v1/messages/count_tokens", response_model=dict[str, int])
    async def count_tokens(request: Request, body: CountRequest) -> Response:
        _known(service, body)
        asked = chat_of(body)
        engine = service.models.pick(body.model).engine.engine
        given = replace(chat.chat_of(asked.messages, asked.chat_template_kwargs), tools=tools.described(asked))
        return json_response({"input_tokens": len(await service.in_pool(lambda: engine.encode(given)))})

    return router


def _known(service: Service, body: CountRequest) -> None:
    if service.options.extra_fields == "refuse":
        check_known(body)
