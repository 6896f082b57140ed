"""The routes of /v1/messages."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from specbuild.serve.errors import STATUSES, json_response, renaming
from specbuild.serve.handle_request import answer
from specbuild.serve.request.body import read, takes
from specbuild.serve.request.prepare import chat_tokens
from specbuild.serve.service import Service

from .fields import CountRequest, MessagesRequest
from .messages import PATH, MessageFormat, asked_name, chat_of

_STREAM = {"text/event-stream": {"schema": {"type": "string"}}}
_FAULTS: dict[int | str, dict[str, Any]] = {status: {"model": dict[str, Any]} for status in STATUSES}


def routes(service: Service) -> APIRouter:
    """Return the routes that Anthropic's clients call."""
    router = APIRouter(responses=_FAULTS)

    replies: dict[int | str, dict[str, Any]] = {200: {"model": dict[str, Any], "content": _STREAM}}

    @router.post(PATH, responses=replies, openapi_extra=takes(MessagesRequest))
    async def create_message(request: Request) -> Response:
        body = await read(request, MessagesRequest, service.refuses_unknown)
        with renaming(asked_name):
            return await answer(service, request, chat_of(body), MessageFormat)

    @router.post(f"{PATH}/count_tokens", response_model=dict[str, int], openapi_extra=takes(CountRequest))
    async def count_tokens(request: Request) -> Response:
        body = await read(request, CountRequest, service.refuses_unknown)
        engine = service.models.pick(body.model).engine.engine
        with renaming(asked_name):
            reasons = service.options.reading.reasoning is not None
            tokens = await service.tokenizing(partial(chat_tokens, engine, chat_of(body), reasons))
        return json_response({"input_tokens": len(tokens)})

    return router
