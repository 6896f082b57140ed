"""The FastAPI application: routes over the served models, behind the gate."""

from __future__ import annotations

import asyncio
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
from specbuild.serve.errors import ApiError, api_error, faults, json_response
from specbuild.serve.options import ServeOptions
from specbuild.serve.page import routes as page
from specbuild.serve.request.body import schemas
from specbuild.serve.request.generation import ClientGoneError
from specbuild.serve.responses_api import routes as response_routes
from specbuild.serve.responses_api.response_registry import ResponseRegistry
from specbuild.serve.responses_api.store import Store
from specbuild.serve.service import Service
from specbuild.serve.telemetry.logs import RequestLog

from . import openai_routes
from .error_shapes import refusal
from .methods import Methods, allowed
from .middleware import behind_gate, path_of


def make_app(service: Service, log: RequestLog, operators: bool = False) -> ASGIApp:
    """Return the ASGI application; every request is logged in `log`. `operators`: it has the canary's routes too."""
    options, own = service.options, version("specbuild-trt")
    app = _App(title="specbuild", version=own, root_path=options.root_path, docs_url=None, redoc_url=None)
    app.state.service = service
    app.include_router(openai_routes.routes(service))
    app.include_router(response_routes.routes(service, ResponseRegistry(Store(options.response_store))))
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
    return behind_gate(Methods(app), log.ended, options)


def _operations(service: Service) -> APIRouter:
    """Return the routes that supervisors, scrapers and people call."""
    router = APIRouter(responses=faults(statuses=(401, 405, 500)))
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
