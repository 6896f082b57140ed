"""The front: reads a request, hashes the beginning of its prompt, and forwards a replica's answer.

It has the bundles' tokenizers but not their weights. Ray Serve calls it as the application's ingress.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import msgspec
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specbuild.runtime import SpecbuildError
from specbuild.runtime.requests.tokenizer import Tokenizer
from specbuild.serve.anthropic.routes import MESSAGES
from specbuild.serve.clouds.routes import GENERATE, GENERATE_STREAM, route_of
from specbuild.serve.errors import ApiError, json_response
from specbuild.serve.http.methods import Methods
from specbuild.serve.http.middleware import OPERATORS, behind_gate, below, path_of
from specbuild.serve.openai.formats import event
from specbuild.serve.options import ServeOptions
from specbuild.serve.request.body import decoded, fields_of
from specbuild.serve.request.fields import ChatRequest, CompletionRequest, Sampling
from specbuild.serve.request.generation import ClientGoneError, unless_gone
from specbuild.serve.request.parameters import cache_key, salt_of
from specbuild.serve.request.prepare import prompts_of, requested_chat
from specbuild.serve.responses_api import conversation
from specbuild.serve.responses_api.fields import ResponsesRequest
from specbuild.serve.telemetry.logs import RequestLog, error_of
from specbuild.serve.text_route import CHATS, COMPLETIONS

from .prefixes import chain
from .router import Hint

BROADCAST_SECONDS = 5.0  # that all replicas have to answer one question
TRIES = 3  # attempts for a request of which nothing was sent yet
ANY = Hint([], 0, 0)  # no known prompt: the router goes by load


_ROUTES = {route.path: route for route in (CHATS, COMPLETIONS, MESSAGES, GENERATE, GENERATE_STREAM)} | {"/": GENERATE}
_PASSED = "type client asgi http_version method scheme path raw_path query_string root_path".split()
_SAMPLE = re.compile(r"^([\w:]+)(\{?)")  # a metric's name, and whether labels follow


class Front:
    """Serves everything that one server does.

    `replicas`: Ray's handle of the replicas. `tokenizers`: by the models' names.
    """

    def __init__(
        self,
        replicas: Any,
        tokenizers: Mapping[str, Tokenizer],
        options: ServeOptions,
        log: RequestLog,
    ) -> None:
        self._replicas, self._tokenizers, self._options, self._log = replicas, tokenizers, options, log
        self._pool = ThreadPoolExecutor(2, "specbuild-front")
        self._calls = replicas.options(method_name="call", stream=True)

    def app(self) -> ASGIApp:
        """Return the ASGI application, behind the same gate as one server has."""
        asked = self._options.health_route
        ready = ("/health", "/health/ready", "/ping", *([asked] if asked else []))
        own = {"/health/live": _live, **dict.fromkeys(ready, self._ready)}
        own |= {"/metrics": self._metrics, "/load": self._each}
        routes = [Route(path, answer) for path, answer in own.items()]
        if self._options.canary:
            routes += [Route("/canary", self._each), Route("/canary/{order}", self._each, methods=["POST"])]
        ours = Methods(Starlette(routes=routes, exception_handlers={ApiError: _refused}))

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            passed = scope["type"] == "http" and path_of(scope) not in own and not below(path_of(scope), OPERATORS)
            await (self._pass if passed else ours)(scope, receive, send)

        def ended(**told: Any) -> None:
            if told["status"] >= 400:  # the others are logged by their replicas
                self._log.ended(**told)

        gate = behind_gate(app, ended, self._options)

        async def outer(scope: Scope, receive: Receive, send: Send) -> None:
            await gate(scope, receive, _without_id(send))

        return outer

    async def _ready(self, request: Request) -> Response:
        """Answer whether requests are taken; having no replicas is fine if autoscaling allows it."""
        app = await asyncio.to_thread(lambda: serve.status().applications[serve.get_replica_context().app_name])
        states = {name: told.status.value for name, told in app.deployments.items()}
        able = app.status.value == "RUNNING"
        return json_response({"status": "ready" if able else "not ready", "deployments": states}, 200 if able else 503)

    async def _metrics(self, request: Request) -> Response:
        """Return every replica's metrics, each line with the label `replica`."""
        families = dict[str, list[str]]()
        for name, (status, _, told) in (await self._all(request)).items():
            if status == 200:
                _add(families, told.decode(), name)
        text = "".join("".join(lines) for lines in families.values())
        return Response(text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _each(self, request: Request) -> Response:
        """Return what each replica answers, by its name: its load, or its canary after an order if there is one."""
        found = await self._all(request)
        status = max((status for status, _, _ in found.values()), default=200)
        replicas = {name: msgspec.json.decode(body) for name, (_, _, body) in found.items()}
        return json_response({"replicas": replicas}, status)

    async def _all(self, request: Request) -> dict[str, tuple[int, str, bytes]]:
        """Return each replica's own answer to a request (status, content type, body), by replica name."""
        scope = _plain(request.scope, "")
        try:
            asking = self._replicas.broadcast("whole", scope)
            found = await asyncio.to_thread(asking.results, timeout_s=BROADCAST_SECONDS)
        except DeploymentUnavailableError:  # there are no replicas now
            return {}
        except TimeoutError:
            told = f"a replica did not answer within {BROADCAST_SECONDS:g} s: try again"
            raise ApiError(503, told, code="replica_slow") from None
        return dict(sorted(found))

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have a replica answer; if it dies before anything was sent, another one is tried."""
        body = (await receive()).get("body", b"")
        hint = await asyncio.get_running_loop().run_in_executor(self._pool, self._hint, scope, body)
        sent = _Sent(send)
        for left in reversed(range(TRIES)):
            try:
                await unless_gone(receive, self._answer(_plain(scope, scope["state"]["request_id"]), body, hint, sent))
                return
            except ClientGoneError:
                raise
            except BackPressureError:
                told = "every replica has all that it takes, and the queue is full: try again later"
                raise ApiError(429, told, code="queue_full") from None
            except (RayError, DeploymentUnavailableError) as error:
                again = left > 0 and not sent.kind
                self._log.event("warning", "a replica was lost", again=again, **error_of(error))
                if not again:
                    await sent.lost()
                    return

    async def _answer(self, scope: Scope, body: bytes, hint: Hint, send: Send) -> None:
        answers = self._calls.remote(scope, body, hint=hint)
        try:
            async for messages in answers:
                for message in messages:
                    await send(message)
                if messages[-1]["type"] == "http.response.body" and not messages[-1].get("more_body"):
                    return  # the answer is whole, so a client that leaves now cancels nothing
        except BaseException:  # the client has left, or takes nothing: nobody reads the rest
            answers.cancel()
            raise

    def _hint(self, scope: Scope, body: bytes) -> Hint:
        """Return the hint of a request; an invalid request has none, since its replica reports the error."""
        with suppress(ValueError, SpecbuildError, ApiError):
            if scope["method"] == "POST" and (read := _translated(path_of(scope), body)):
                return self._prompt(read, scope["state"]["tenant"])
        return ANY

    def _prompt(self, body: Sampling, tenant: str | None) -> Hint:
        name = body.model or next(iter(self._tokenizers))
        tokenizer = self._tokenizers.get(name)
        if tokenizer is None:
            return ANY
        asked = body.max_tokens
        if isinstance(body, ChatRequest):
            prompts = [tokenizer.encode(requested_chat(body))]
            asked = body.max_completion_tokens or asked
        else:
            assert isinstance(body, CompletionRequest)
            prompts = [each if isinstance(each, list) else tokenizer.encode(each) for each in prompts_of(body)]
        salt = salt_of(None if self._options.share_prefix_cache else tenant, cache_key(body))
        count = sum(map(len, prompts))
        return Hint(chain(prompts[0], scope_of(name, salt)), count, asked and asked * (body.n or 1))


def _translated(path: str, body: bytes) -> Sampling | None:
    """Return the chat or completion that a body becomes on a replica; None if its beginning is not known here."""
    if path == "/v1/responses":
        asked = decoded(ResponsesRequest, body)
        return None if asked.previous_response_id else conversation.chat_of(asked, ())
    route = route_of(fields_of(body)) if path in ("/invocations", "/predict") else _ROUTES.get(path)
    return route.request(decoded(route.body, body)) if route else None


def scope_of(model: str, salt: str | None) -> str:
    """Return the scope of block hashes, see `chain`: the model and the cache salt."""
    return f"{model}\0{salt}"


class _Sent:
    """Forwards a replica's answer to the client. `kind`: its content type, "" while nothing was sent."""

    def __init__(self, send: Send) -> None:
        self._send, self.kind = send, ""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.kind = dict(message["headers"]).get(b"content-type", b"?").decode("latin-1")
        await self._send(message)

    async def lost(self) -> None:
        """End an answer that has begun, a stream with an event that says why; raises ApiError if nothing was sent."""
        told = ApiError(503, "the replica that had this was lost: send it again", code="replica_lost")
        if not self.kind:
            raise told
        if not self.kind.startswith("text/event-stream"):
            raise ConnectionError("a replica was lost amid its answer")
        await self._send({"type": "http.response.body", "body": event(told.body()), "more_body": False})


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _live(request: Request) -> Response:
    return json_response({"status": "live"})


def _without_id(send: Send) -> Send:
    """Leave out the request's id, since Ray's proxy adds it too."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [x for x in message["headers"] if x[0].lower() != b"x-request-id"]}
        await send(message)

    return sending


def _plain(scope: Scope, request_id: str) -> Scope:
    """Return the part of a request's scope that can be sent to another process."""
    headers = [each for each in scope["headers"] if each[0] != b"x-request-id"]
    named = [(b"x-request-id", request_id.encode())] if request_id else []
    return {name: scope[name] for name in _PASSED if name in scope} | {"headers": [*headers, *named]}


def _add(families: dict[str, list[str]], text: str, replica: str) -> None:
    """Add a replica's metrics to the others', family by family."""
    lines, own = list[str](), f'replica="{replica}"'
    for line in text.splitlines(keepends=True):
        if line.startswith("# HELP "):
            new = line.split()[2] not in families
            lines = families.setdefault(line.split()[2], [])
        if not line.startswith("#"):
            lines.append(_SAMPLE.sub(lambda found: f"{found[1]}{{{own}{',' if found[2] else '}'}", line))
        elif new:
            lines.append(line)
