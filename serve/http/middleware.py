"""The gate: an ASGI middleware that every request passes before a route sees it, and that logs it afterwards.

It gives the request an id, checks the API key, bounds the body's size and time, and cuts off a client that does not
read its response.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specbuild.serve import limits
from specbuild.serve.errors import ApiError, api_error
from specbuild.serve.options import ServeOptions
from specbuild.serve.request.generation import ClientGoneError
from specbuild.serve.telemetry.logs import error_of

from .error_shapes import refusal

_ID = re.compile(rf"[!-~]{{1,{limits.REQUEST_ID_CHARACTERS}}}")
_ABSOLUTE = re.compile("https?://[^/]*", re.IGNORECASE)
_KEY_DIGITS = 12  # of the hash of an API key, by which the log names it
OPERATORS = "/canary"  # this path and all below it are the operator's
_OPEN = "/health"  # this path and all below it need no API key


class Gate:
    """Wraps an app. A request's state gets `request_id`, `tenant` (None: no API keys) and `told`, its log line."""

    def __init__(
        self,
        app: ASGIApp,
        ended: Callable[..., None],
        options: ServeOptions,
        body_seconds: float = limits.BODY_SECONDS,
        send_seconds: float = limits.SEND_SECONDS,
    ) -> None:
        """Wrap an app.

        Args:
            app: The application behind the gate.
            ended: Logs a request that has ended.
            options: The keys that are accepted, the operator's, and which paths need none.
            body_seconds: Seconds in which a request's whole body must have arrived.
            send_seconds: Seconds after which a client that reads nothing is cut off.
        """
        self._app, self._ended = app, ended
        self._body_seconds, self._send_seconds = body_seconds, send_seconds
        self._keys = [key.encode() for key in options.api_keys]
        self._admin_keys = [options.admin_key.encode()] if options.admin_key else []
        self._probes, self._ui = (_OPEN, "/ping", options.health_route), options.ui
        self.requests = self.body_bytes = 0  # in progress, and of their bodies that are not small

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = origin_form(scope)
        headers, began = Headers(scope=scope), time.perf_counter()
        given = headers.get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        told: dict[str, Any] = {}
        scope.setdefault("state", {}).update(request_id=request_id, told=told, tenant=None)
        answer = _Answer(send, scope["state"], self._send_seconds)
        self.requests += 1
        try:
            await self._pass(scope, headers, receive, answer)
        except ClientGoneError:
            answer.status = 499
        except (TimeoutError, asyncio.TimeoutError):
            answer.status = 499
            told["error"] = f"the client took nothing for {self._send_seconds:g} s and was cut off"
            raise
        except Exception as error:
            told.update(error_of(error))
            if answer.status and not answer.whole:
                raise
            if not answer.status:
                await refusal(scope, path_of(scope), api_error(error))(scope, receive, answer)
        finally:
            self.requests -= 1
            if not (self._open(scope) and answer.status in (200, 204)):  # successful probes are not logged
                self._ended(
                    request_id=scope["state"]["request_id"],
                    method=scope["method"],
                    path=scope["path"],
                    status=answer.status or 499,
                    seconds=time.perf_counter() - began,
                    client=(scope.get("client") or (None,))[0],
                    key=(scope["state"]["tenant"] or "")[:_KEY_DIGITS] or None,
                    **told,
                )

    async def _pass(self, scope: Scope, headers: Headers, receive: Receive, answer: _Answer) -> None:
        body = _Body(self)
        try:
            try:
                self._check(scope, headers)
                await body.read(headers, receive, self._body_seconds)
            except ApiError as error:
                scope["state"]["told"]["error"] = error.message
                answer.closing = True  # the rest of the body is not read
                await refusal(scope, path_of(scope), error)(scope, receive, answer)
                return
            await self._app(scope, body.replay(receive), answer)
        finally:
            body.free()

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Raise ApiError for too many requests or headers, or a wrong API key; note whose the request is."""
        if sum(len(name) + len(value) for name, value in scope["headers"]) > limits.HEADER_BYTES:
            told = f"the request's headers have more than {limits.HEADER_BYTES} bytes: send less"
            raise ApiError(431, told, code="headers_too_large")
        if self._open(scope):
            return
        if self.requests > limits.CONNECTIONS:
            told = f"{limits.CONNECTIONS} requests are under way: try again later"
            raise ApiError(503, told, code="too_many_requests")
        if below(path_of(scope), OPERATORS):
            _key(self._admin_keys, headers, "give the operator's key, by which the server was started with --admin-key")
        elif self._keys:
            scope["state"]["tenant"] = _key(self._keys, headers, "give one of the server's API keys")

    def _open(self, scope: Scope) -> bool:
        """Return whether the path needs no API key."""
        path = path_of(scope)
        page = self._ui and path == "/" and scope["method"] in ("GET", "HEAD")
        return page or path in self._probes or below(path, _OPEN)


def _key(keys: Sequence[bytes], headers: Headers, told: str) -> str:
    """Return the hash of the key that a request gives; raises ApiError if it is missing or none of these."""
    given = headers.get("authorization") or f"Bearer {headers.get('x-api-key', '')}"  # as Anthropic's clients do
    scheme, _, key = given.partition(" ")
    right = [known for known in keys if hmac.compare_digest(known, key.strip().encode())]
    if scheme.lower() != "bearer" or not right:
        raise ApiError(401, f"{told}: Authorization: Bearer KEY", code="invalid_api_key")
    return hashlib.sha256(right[0]).hexdigest()


def below(path: str, top: str) -> bool:
    """Return whether a path is another one or below it."""
    return path == top or path.startswith(f"{top}/")


class _Answer:
    """The sending side of a request: notes the status, adds the request's id, and limits the wait for a slow client."""

    def __init__(self, send: Send, state: dict[str, Any], seconds: float) -> None:
        self._send, self._state, self._seconds = send, state, seconds
        self.status, self.closing, self.whole = 0, False, False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["X-Request-Id"] = self._state["request_id"]
            headers.update(self._state.get("headers", {}))
            if self.closing:
                headers["Connection"] = "close"
        with anyio.fail_after(self._seconds):  # unlike asyncio.wait_for, makes no task per chunk
            await self._send(message)
        self.whole = message["type"] == "http.response.body" and not message.get("more_body")


def behind_gate(app: ASGIApp, ended: Callable[..., None], options: ServeOptions) -> ASGIApp:
    """Return an application behind a gate, which pages of the allowed origins may call."""
    gate = Gate(app, ended, options)
    if not options.allowed_origins:
        return gate
    return CORSMiddleware(gate, list(options.allowed_origins), allow_methods=["*"], allow_headers=["*"])


def origin_form(scope: Scope) -> Scope:
    """Return a scope whose path has no `http://host` before it, as clients of a proxy write it."""
    found = _ABSOLUTE.match(scope["path"])
    if not found:
        return scope
    path: str = scope["path"][found.end() :] or "/"
    return {**scope, "path": path, "raw_path": path.encode()}


def path_of(scope: Scope) -> str:
    """Return a request's path below the root path."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    below = path.removeprefix(root)
    return below or "/" if below.startswith("/") or not below else path


class _Body:
    """A request's body, whose bytes count in its gate's until it is freed, unless they are few."""

    def __init__(self, gate: Gate) -> None:
        self._gate, self._parts, self._size, self._counted = gate, list[bytes](), 0, 0

    async def read(self, headers: Headers, receive: Receive, seconds: float) -> None:
        """Read all of it; raises ClientGoneError, and ApiError if it is too large or too slow, or there is no room."""
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > limits.BODY_BYTES:
            raise _too_large()
        try:
            await asyncio.wait_for(self._read(receive), seconds)
        except (TimeoutError, asyncio.TimeoutError):
            told = f"the request's body took longer than {seconds:g} s: send it faster"
            raise ApiError(408, told, code="slow_body") from None

    async def _read(self, receive: Receive) -> None:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            self._add(message.get("body", b""))
            if not message.get("more_body"):
                return

    def _add(self, part: bytes) -> None:
        self._parts.append(part)
        self._size += len(part)
        if self._size > limits.BODY_BYTES:
            raise _too_large()
        if self._size > limits.SMALL_BODY_BYTES:
            more = self._size - self._counted
            if self._gate.body_bytes + more > limits.BODIES_BYTES:
                told = f"large bodies under way have {limits.BODIES_BYTES} bytes, as many as may: try again later"
                raise ApiError(429, told, code="body_bytes")
            self._gate.body_bytes, self._counted = self._gate.body_bytes + more, self._size

    def free(self) -> None:
        """Give back the room of its bytes."""
        self._gate.body_bytes -= self._counted
        self._counted = 0

    def replay(self, receive: Receive) -> Receive:
        """Return a `receive` that first gives the body, then any further messages."""
        left: list[Message] = [{"type": "http.request", "body": b"".join(self._parts), "more_body": False}]
        self._parts.clear()

        async def again() -> Message:
            return left.pop() if left else await receive()

        return again


def _too_large() -> ApiError:
    return ApiError(413, f"the request has more than {limits.BODY_BYTES} bytes: send less", code="body_too_large")
