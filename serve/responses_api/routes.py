"""The routes of /v1/responses."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Message

from specbuild.serve.errors import ApiError, faults, json_response, renaming
from specbuild.serve.handle_request import begin, respond
from specbuild.serve.request.body import read, takes
from specbuild.serve.request.generation import EventStream
from specbuild.serve.service import Service
from specbuild.serve.text_route import replies

from .conversation import asked_name, chat_of
from .fields import ResponsesRequest
from .response import ResponseFormat
from .response_registry import ResponseRegistry


async def _stays() -> Message:
    """Receive nothing, as from a client that never leaves: what runs in the background needs none."""
    return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]


def routes(service: Service, registry: ResponseRegistry) -> APIRouter:
    """Return the routes of /v1/responses."""
    router = APIRouter(responses=faults())

    @router.post("/v1/responses", responses=replies(), openapi_extra=takes(ResponsesRequest))
    async def create(request: Request) -> Response:
        body = await read(request, ResponsesRequest, service.refuses_unknown)
        if body.background and (body.stream or body.store is False):
            raise ApiError(400, "a background response is stored, and not streamed", param="background")
        before = await registry.conversation(request.state.tenant, body.previous_response_id)
        with renaming(asked_name):
            chat = await asyncio.to_thread(chat_of, body, before)
            chat.stream = True if body.background else chat.stream
            asking = Request(request.scope, _stays) if body.background else request
            form = await begin(service, asking, chat, partial(ResponseFormat, asked=body, registry=registry))
            reply = await respond(service, asking, form)
        if not body.background:
            return reply
        assert isinstance(reply, EventStream)
        registry.behind(reply.drain())
        return json_response(form.body)

    @router.get("/v1/responses/{number}", response_model=dict[str, Any])
    async def retrieve(request: Request, number: str) -> Response:
        return json_response(await registry.get(request.state.tenant, number))

    @router.get("/v1/responses/{number}/input_items", response_model=dict[str, Any])
    async def list_items(request: Request, number: str) -> Response:
        items = await registry.items(request.state.tenant, number)
        return json_response({"object": "list", "data": items[::-1], "has_more": False})

    @router.delete("/v1/responses/{number}", response_model=dict[str, Any])
    async def delete(request: Request, number: str) -> Response:
        await registry.delete(request.state.tenant, number)
        return json_response({"id": number, "object": "response", "deleted": True})

    @router.post("/v1/responses/{number}/cancel", response_model=dict[str, Any])
    async def cancel(request: Request, number: str) -> Response:
        return json_response(await registry.cancel(request.state.tenant, number))

    return router
