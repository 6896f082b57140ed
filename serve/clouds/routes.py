"""The routes of SageMaker, Vertex AI and text-generation-inference."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Message

from specbuild.serve.errors import ApiError, faults, json_response
from specbuild.serve.request.body import converted, fields_of, json_of, read, takes
from specbuild.serve.service import Service
from specbuild.serve.text_route import CHATS, COMPLETIONS, TextRoute, replies

from .fields import GenerateRequest, PredictRequest
from .tgi import TgiFormat, asked_name, completion_of

GENERATE = TextRoute("/generate", GenerateRequest, TgiFormat, partial(completion_of, stream=False), asked_name)
GENERATE_STREAM = replace(GENERATE, path="/generate_stream", request=partial(completion_of, stream=True))
_ROUTES = {"inputs": GENERATE, "messages": CHATS, "prompt": COMPLETIONS}


def routes(service: Service, predict: str | None = None) -> APIRouter:
    """Return all of them; `predict`: Vertex AI's prediction route, if it asks for one."""
    router = APIRouter(responses=faults(dict[str, Any]))
    either = replies(dict[str, Any] | list[Any])
    GENERATE.add(router, service)
    GENERATE_STREAM.add(router, service)

    @router.post("/", responses=either, openapi_extra=takes(GenerateRequest))
    async def generate_either(request: Request) -> Response:
        return await _either(service, request, await read(request, GenerateRequest, service.refuses_unknown))

    @router.get("/info", response_model=dict[str, Any])
    async def info() -> Response:
        served = service.models.all[0]
        engine = served.engine.engine
        told = {"model_id": served.name, "max_total_tokens": engine.max_model_len, "version": version("specbuild-trt")}
        return json_response(told | {"router": "specbuild", "max_concurrent_requests": service.options.max_waiting})

    @router.post("/invocations", responses=either, openapi_extra=takes())
    async def invocations(request: Request) -> Response:
        return await _any(service, request, fields_of(await json_of(request)))

    @router.post(predict or "/predict", responses=either, openapi_extra=takes())
    async def make_predictions(request: Request) -> Response:
        fields = fields_of(await json_of(request))
        if fields.get("instances") is None:  # Vertex AI's raw prediction: a request as it is
            return await _any(service, request, fields)
        asked = converted(PredictRequest, fields, service.refuses_unknown)
        return json_response({"predictions": await _predictions(service, request, asked)})

    return router


async def _either(service: Service, request: Request, body: GenerateRequest) -> Response:
    """Answer with a stream if asked, else with a list of one answer."""
    if body.stream:
        return await GENERATE_STREAM.answer(service, request, body)
    reply = await GENERATE.answer(service, request, body)
    return Response(b"[" + bytes(reply.body) + b"]", media_type="application/json")


def route_of(given: dict[str, Any]) -> TextRoute:
    """Return the route whose body this is, as its `inputs`, `messages` or `prompt` tells; raises ApiError."""
    for name, route in _ROUTES.items():
        if given.get(name) is not None:
            return route
    raise ApiError(400, "give inputs, messages or prompt: a text, a chat, or a completion's", param="inputs")


async def _any(service: Service, request: Request, given: dict[str, Any]) -> Response:
    """Answer the body of any of these routes; raises ApiError."""
    route = route_of(given)
    body = converted(route.body, given, service.refuses_unknown)
    if isinstance(body, GenerateRequest):
        return await _either(service, request, body)
    return await route.answer(service, request, body)


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
