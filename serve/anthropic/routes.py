"""The routes of /v1/messages."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from specbuild.serve.errors import faults, json_response, renaming
from specbuild.serve.request.body import read, takes
from specbuild.serve.request.prepare import chat_tokens
from specbuild.serve.service import Service
from specbuild.serve.text_route import TextRoute

from .fields import CountRequest, MessagesRequest
from .messages import PATH, MessageFormat, asked_name, chat_of

MESSAGES = TextRoute(PATH, MessagesRequest, MessageFormat, chat_of, asked_name)


def routes(service: Service) -> APIRouter:
    """Return the routes that Anthropic's clients call."""
    router = APIRouter(responses=faults(dict[str, Any]))
    MESSAGES.add(router, service)

    @router.post(f"{PATH}/count_tokens", response_model=dict[str, int], openapi_extra=takes(CountRequest))
    async def count_tokens(request: Request) -> Response:
        body = await read(request, CountRequest, service.refuses_unknown)
        engine = service.models.pick(body.model).engine.engine
        with renaming(asked_name):
            reasons = service.options.reading.reasoning is not None
            tokens = await service.tokenizing(partial(chat_tokens, engine, chat_of(body), reasons))
        return json_response({"input_tokens": len(tokens)})

    return router
