"""Methods of routes: HEAD is GET without a body, OPTIONS names what a path allows, and so does a 405."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Message, Receive, Scope, Send

_METHODS = ("DELETE", "GET", "PATCH", "POST", "PUT")


def allowed(app: Starlette, scope: Scope) -> list[str]:
    """Return the methods that a request's path allows; none if no route has the path."""
    root_path = scope.get("root_path") or getattr(app, "root_path", "")

    def matches(method: str) -> bool:
        asked = {**scope, "root_path": root_path, "method": method}
        return any(route.matches(asked)[0] is Match.FULL for route in app.routes)

    found = {method for method in _METHODS if matches(method)}
    added = {"OPTIONS", "HEAD"} if "GET" in found else {"OPTIONS"}
    return sorted(found | added) if found else []


class Methods:
    """Wraps an app whose routes know neither HEAD nor OPTIONS."""

    def __init__(self, app: Starlette) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        head, options = (scope.get("method") == method for method in ("HEAD", "OPTIONS"))
        if not (head or options):
            await self._app(scope, receive, send)
            return
        methods = allowed(self._app, scope)
        if options and methods:
            await Response(status_code=204, headers={"Allow": ", ".join(methods)})(scope, receive, send)
            return
        asked = {**scope, "method": "GET"} if "GET" in methods else scope
        await self._app(asked, receive, _bodiless(send) if head else send)


def _bodiless(send: Send) -> Send:
    async def sending(message: Message) -> None:
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    return sending
