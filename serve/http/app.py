"""The FastAPI application: routes over the served models, behind the gate."""

from __future__ import annotations

import asyncio
from functools import partial
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

from specbuild.runtime import SpecbuildError
from specbuild.serve.anthropic import routes as message_routes
from specbuild.serve.canary import routes as canary_routes
from specbuild.serve.clouds import routes as clouds
from specbuild.serve.errors import STATUSES, ApiError, ErrorBody, api_error, json_response
from specbuild.serve.handle_request import answer
from specbuild.serve.openai import responses
from specbuild.serve.openai.chat import ChatFormat
from specbuild.serve.openai.completions import CompletionFormat
from specbuild.serve.options import ServeOptions
from specbuild.serve.page import routes as page
from specbuild.serve.request.body import read, schemas, takes
from specbuild.serve.request.fields import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from specbuild.serve.request.generation import ClientGoneError
from specbuild.serve.request.models import ServedModel
from specbuild.serve.request.prepare import chat_of, encoded
from specbuild.serve.responses_api import routes as response_routes
from specbuild.serve.responses_api.response_registry import ResponseRegistry
from specbuild.serve.responses_api.store import Store
from specbuild.serve.service import Service

from .error_shapes import refusal
from .methods import Methods, allowed
from .middleware import RequestLog, behind_gate, path_of

_FAULTS: dict[int | str, dict[str, Any]] = {status: {"model": ErrorBody} for status in STATUSES}
_STREAM = {"text/event-stream": {"schema": {"type": "string"}}}


def make_app(service: Service, log: RequestLog, operators: bool = False) -> ASGIApp:
    """Return the ASGI application; every request is logged in `log`. `operators`: it has the canary's routes too."""
    options, own = service.options, version("specbuild-trt")
    app = _App(title="specbuild", version=own, root_path=options.root_path, docs_url=None, redoc_url=None)
    app.state.service = service
    app.include_router(_api(service))
    app.include_router(response_routes.routes(service, ResponseRegistry(Store(options.response_store)), _FAULTS))
    app.include_router(message_routes.routes(service))
    app.include_router(_operations(service))
    app.include_router(clouds.routes(service, options.predict_route))
    if operators and service.canary:
        app.include_router(canary_routes.routes(service.canary))
    if options.ui:
        app.include_router(page.routes(service))
    return _guarded(app, log, options)


class _App(FastAPI):
    """An application whose schema has the bodies, which the routes read themselves."""

    def openapi(self) -> dict[str, Any]:
        """See FastAPI."""
        told = super().openapi()
        told["components"]["schemas"] |= schemas()
        return told


def make_operators_app(service: Service, log: RequestLog) -> ASGIApp:
    """Return the ASGI application for operators: health, load and metrics without a key, and the canary."""
    app = FastAPI(title="specbuild, for operators", version=version("specbuild-trt"), docs_url=None, redoc_url=None)
    app.include_router(_operations(service))
    if service.canary:
        app.include_router(canary_routes.routes(service.canary))
    return _guarded(app, log, service.options.operators or service.options)


def _guarded(app: FastAPI, log: RequestLog, options: ServeOptions) -> ASGIApp:
    """Return an application behind a gate, whose errors are the API's."""
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(ClientGoneError, _left)
    for kind in (ApiError, SpecbuildError, Exception):
        app.add_exception_handler(kind, _failed)
    return behind_gate(Methods(app), log, options)


def _api(service: Service) -> APIRouter:
    """Return the routes that OpenAI's and vLLM's clients call."""
    router = APIRouter(responses=_FAULTS)
    models = service.models

    @router.get("/v1/models", response_model=responses.ModelList)
    async def list_models() -> Response:
        cards = [_card(model, name) for model in models.all for name in model.names]
        return json_response({"object": "list", "data": cards})

    @router.get("/v1/models/{name:path}", response_model=responses.ModelCard)
    async def retrieve_model(name: str) -> Response:
        return json_response(_card(models.pick(name), name))

    completion: dict[int | str, dict[str, Any]] = {200: {"model": responses.Completion, "content": _STREAM}}
    chat: dict[int | str, dict[str, Any]] = {200: {"model": responses.ChatCompletion, "content": _STREAM}}

    @router.post("/v1/completions", responses=completion, openapi_extra=takes(CompletionRequest))
    async def create_completion(request: Request) -> Response:
        return await answer(
            service, request, await read(request, CompletionRequest, service.refuses_unknown), CompletionFormat
        )

    @router.post("/v1/chat/completions", responses=chat, openapi_extra=takes(ChatRequest))
    async def create_chat_completion(request: Request) -> Response:
        return await answer(service, request, await read(request, ChatRequest, service.refuses_unknown), ChatFormat)

    @router.post("/tokenize", response_model=responses.Tokenized, openapi_extra=takes(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        body = await read(request, TokenizeRequest, service.refuses_unknown)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give prompt, a text, or messages, a chat", param="prompt")
        engine = models.pick(body.model).engine.engine

        def work() -> dict[str, Any]:
            if body.messages is None:
                tokens = engine.encode(body.prompt or "")
            else:
                chat = chat_of(body.messages, body.chat_template_kwargs, body.add_generation_prompt)
                tokens = encoded(engine, chat)
            texts = [engine.tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None
            told = {"count": len(tokens), "max_model_len": engine.max_model_len, "tokens": tokens}
            return {**told, "token_strs": texts}

        return json_response(await service.tokenizing(work))

    @router.post("/detokenize", response_model=responses.Detokenized, openapi_extra=takes(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        body = await read(request, DetokenizeRequest, service.refuses_unknown)
        engine = models.pick(body.model).engine.engine
        size = engine.manifest.models["target"].vocab_size
        if any(token >= size for token in body.tokens):
            raise ApiError(400, f"tokens has an id outside the vocabulary of {size}", param="tokens")
        return json_response({"prompt": await service.tokenizing(partial(engine.decode, body.tokens, False))})

    return router


def _card(model: ServedModel, name: str) -> responses.ModelCard:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "specbuild",
        "root": model.path.name,
        "max_model_len": model.engine.engine.max_model_len,
    }


def _operations(service: Service) -> APIRouter:
    """Return the routes that supervisors, scrapers and people call."""
    router = APIRouter(responses={status: _FAULTS[status] for status in (401, 405, 500)})
    health: dict[int | str, dict[str, Any]] = {200: {"model": dict[str, Any]}, 503: {"model": dict[str, Any]}}

    @router.get("/health/live", responses=health)
    async def live() -> Response:
        states = _states(service)
        dead = any(state in ("failed", "stuck") for state in states.values())
        return json_response({"status": "failed" if dead else "live", "models": states}, 503 if dead else 200)

    @router.get("/health/ready", responses=health)
    @router.get("/health", responses=health)
    @router.get("/ping", responses=health)
    async def ready() -> Response:
        states = _states(service)
        able = all(state in ("idle", "running", "exclusive") for state in states.values())
        told = {"status": "ready" if able else "not ready", "models": states}
        watchers = service.supervisor.states if service.supervisor else {}
        return json_response(told | ({"watchers": watchers} if watchers else {}), 200 if able else 503)

    if route := service.options.health_route:
        router.add_api_route(route, ready, responses=health)

    @router.get("/version", response_model=dict[str, str])
    async def show_version() -> Response:
        return json_response({"version": version("specbuild-trt")})

    @router.get("/load", response_model=dict[str, Any])
    async def load() -> Response:
        usages = {model.name: model.engine.engine.usage for model in service.models.all}
        told = {
            name: {"running": each.running, "waiting": each.waiting + each.to_come, "slots": each.slots}
            for name, each in usages.items()
        }
        return json_response({"server_load": service.requests, "models": told})

    @router.get("/metrics", responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})
    async def metrics(request: Request) -> Response:
        text, kind = await asyncio.to_thread(service.metrics.render, request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": kind})

    return router


def _states(service: Service) -> dict[str, str]:
    """Return the state of each engine's worker; draining if the server takes nothing new."""
    states = dict[str, str]()
    for model in service.models.all:
        state = model.engine.engine.health().state
        held = model.admission.draining and state in ("idle", "running", "exclusive")
        states[model.name] = "draining" if held else state
    return states


async def _left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _failed(request: Request, error: Exception) -> Response:
    told = api_error(error)
    request.state.told["error"] = f"{type(error).__name__}: {error}" if told.status >= 500 else told.message
    return _reply(request, told)


async def _http(request: Request, error: Exception) -> Response:
    """Answer one of Starlette's own errors: no such path, no such method, a body that is not JSON."""
    assert isinstance(error, HTTPException)
    reply = _reply(request, ApiError(error.status_code, f"{error.detail}: {request.method} {request.url.path}"))
    if error.status_code == 405:
        reply.headers["Allow"] = ", ".join(allowed(request.app, request.scope))
    return reply


def _reply(request: Request, told: ApiError) -> Response:
    return refusal(request.scope, path_of(request.scope), told)
