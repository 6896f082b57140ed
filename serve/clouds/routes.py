"""The routes of SageMaker, Vertex AI and text-generation-inference."""

from __future__ import annotations

import asyncio
import json
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Message

from specbuild.serve.errors import STATUSES, ApiError, json_response, renaming
from specbuild.serve.handle_request import answer
from specbuild.serve.openai.chat import ChatFormat
from specbuild.serve.openai.completions import CompletionFormat
from specbuild.serve.request.body import Body, converted, fields_of, json_of, read, takes
from specbuild.serve.request.fields import ChatRequest, CompletionRequest
from specbuild.serve.service import Service

from .fields import GenerateRequest, PredictRequest
from .tgi import TgiFormat, asked_name, completion_of

_STREAM = {"text/event-stream": {"schema": {"type": "string"}}}
_REPLY: dict[int | str, dict[str, Any]] = {200: {"model": dict[str, Any], "content": _STREAM}}
_ANY: dict[int | str, dict[str, Any]] = {200: {"model": dict[str, Any] | list[Any], "content": _STREAM}}
_FAULTS: dict[int | str, dict[str, Any]] = {status: {"model": dict[str, Any]} for status in STATUSES}
_KINDS: dict[str, type[Body]] = {"inputs": GenerateRequest, "messages": ChatRequest, "prompt": CompletionRequest}


def routes(service: Service, predict: str | None = None) -> APIRouter:
    """Return all of them; `predict`: Vertex AI's prediction route, if it asks for one."""
    router = APIRouter(responses=_FAULTS)

    @router.post("/generate", responses=_REPLY, openapi_extra=takes(GenerateRequest))
    async def generate(request: Request) -> Response:
        return await _generated(
            service, request, await read(request, GenerateRequest, service.refuses_unknown), stream=False
        )

    @router.post("/generate_stream", responses=_REPLY, openapi_extra=takes(GenerateRequest))
    async def generate_stream(request: Request) -> Response:
        return await _generated(
            service, request, await read(request, GenerateRequest, service.refuses_unknown), stream=True
        )

    @router.post("/", responses=_ANY, openapi_extra=takes(GenerateRequest))
    async def generate_either(request: Request) -> Response:
        return await _either(service, request, await read(request, GenerateRequest, service.refuses_unknown))

    @router.get("/info", response_model=dict[str, Any])
    async def info() -> Response:
        served = service.models.all[0]
        engine = served.engine.engine
        told = {"model_id": served.name, "max_total_tokens": engine.max_model_len, "version": version("specbuild-trt")}
        return json_response(told | {"router": "specbuild", "max_concurrent_requests": service.options.max_waiting})

    @router.post("/invocations", responses=_ANY, openapi_extra=takes())
    async def invocations(request: Request) -> Response:
        return await _any(service, request, fields_of(await json_of(request)))

    @router.post(predict or "/predict", responses=_ANY, openapi_extra=takes())
    async def make_predictions(request: Request) -> Response:
        fields = fields_of(await json_of(request))
        if fields.get("instances") is None:  # Vertex AI's raw prediction: a request as it is
            return await _any(service, request, fields)
        asked = converted(PredictRequest, fields, service.refuses_unknown)
        return json_response({"predictions": await _predictions(service, request, asked)})

    return router


async def _generated(service: Service, request: Request, body: GenerateRequest, stream: bool) -> Response:
    with renaming(asked_name):
        return await answer(service, request, completion_of(body, stream), TgiFormat)


async def _either(service: Service, request: Request, body: GenerateRequest) -> Response:
    """Answer with a stream if asked, else with a list of one answer."""
    reply = await _generated(service, request, body, bool(body.stream))
    return reply if body.stream else Response(b"[" + bytes(reply.body) + b"]", media_type="application/json")


def body_of(given: dict[str, Any], known: bool = False) -> Body:
    """Return a body whose kind its `inputs`, `messages` or `prompt` tells; raises ApiError.

    `known`: whether a field that no route knows is an error.
    """
    kind = next((kind for name, kind in _KINDS.items() if given.get(name) is not None), None)
    if kind is None:
        raise ApiError(400, "give inputs, messages or prompt: a text, a chat, or a completion's", param="inputs")
    return converted(kind, given, known)


async def _any(service: Service, request: Request, given: dict[str, Any]) -> Response:
    """Answer any body of `body_of`; raises ApiError."""
    body = body_of(given, service.refuses_unknown)
    if isinstance(body, GenerateRequest):
        return await _either(service, request, body)
    if isinstance(body, ChatRequest):
        return await answer(service, request, body, ChatFormat)
    assert isinstance(body, CompletionRequest)
    return await answer(service, request, body, CompletionFormat)


async def _predictions(service: Service, request: Request, asked: PredictRequest) -> list[Any]:
    """Answer all instances at once: with the texts of `inputs`, with the responses of chats and completions.

    Raises ApiError.
    """
    bodies = [_instance(each, asked.parameters or {}) for each in asked.instances]
    if any(body.get("stream") for body in bodies):
        raise ApiError(400, "predictions are not streamed: leave stream out", param="instances")
    leaving = asyncio.ensure_future(request.receive())

    async def receive() -> Message:
        return await asyncio.shield(leaving)  # all instances wait for the same client

    def one(number: int) -> Request:
        state = request.scope["state"]
        name = f"{state['request_id']}-{number}"
        return Request({**request.scope, "state": {**state, "told": {}, "request_id": name}}, receive)

    requests = [one(number) for number in range(len(bodies))]
    working = [asyncio.ensure_future(_any(service, *each)) for each in zip(requests, bodies, strict=True)]
    try:
        replies = [json.loads(bytes(reply.body)) for reply in await asyncio.gather(*working)]
    finally:
        for task in (leaving, *working):
            task.cancel()
        await asyncio.gather(leaving, *working, return_exceptions=True)
        for name in ("prompt_tokens", "output_tokens"):
            request.state.told[name] = sum(each.state.told.get(name, 0) for each in requests)
    return [reply[0]["generated_text"] if isinstance(reply, list) else reply for reply in replies]


def _instance(given: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
    """Return an instance as a request; `@requestFormat` is left out, since the fields tell the format too."""
    fields = {name: value for name, value in given.items() if name != "@requestFormat"}
    fields = {name: value for name, value in fields.items() if value is not None}
    if "inputs" in fields:
        return {"parameters": parameters, **fields} if parameters else fields
    return parameters | fields
