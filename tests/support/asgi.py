"""An ASGI application called as a server calls it, with what its client sends and what it is sent."""

import asyncio
from typing import Any

Message = dict[str, Any]
GONE = {"type": "http.disconnect"}


def part(body, more=False):
    """A part of a request's body."""
    return {"type": "http.request", "body": body, "more_body": more}


def scope_of(method, path, **headers):
    """A request; `_` stands for `-` in headers' names."""
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "method": method}
    scope |= {"path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": raw}
    return scope | {"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2)}


def call(app, scope, messages, leaves=False, send=None):
    """What the client is sent; after its messages it is silent, or leaves once it has some of a body."""
    sent, left, heard = list[Message](), list(messages), asyncio.Event()

    async def receive():
        if left:
            return left.pop(0)
        await heard.wait()
        return GONE

    async def keep(message):
        sent.append(message)
        if leaves and message.get("body"):
            heard.set()

    asyncio.run(asyncio.wait_for(app(scope, receive, send or keep), 60))
    return sent
