"""Connections whose clients do not ask, or ask slowly."""

import asyncio
import time

import pytest
import uvicorn
from serving import running
from starlette.requests import Request
from starlette.responses import Response

from specbuild.serve.http.connection import Connection

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def app(scope, receive, send):
    await asyncio.sleep(float(Request(scope).headers.get("wait", 0)))
    await Response("here")(scope, receive, send)


class Hasty(Connection):
    """A client has little time."""

    header_seconds = 0.3
    max_connections = 2


async def answered(*readers):
    for each in readers:
        assert (await each.readuntil(b"here")).startswith(b"HTTP/1.1 200")


def test_idle_connections_make_way_for_others():
    """The one that has been idle longest; a request under way goes on, also where there is nothing else."""

    async def client(reader, writer):
        address = writer.get_extra_info("peername")[:2]
        writer.write(REQUEST.replace(b"x\r\n", b"x\r\nWait: 0.2\r\n"))
        await asyncio.sleep(0.05)
        (first, idle), (second, asking) = [await asyncio.open_connection(*address) for _ in range(2)]
        assert await asyncio.wait_for(first.read(), 5) == b""
        asking.write(REQUEST)
        await answered(second, reader)
        for each in (asking, writer):
            each.write(REQUEST.replace(b"x\r\n", b"x\r\nWait: 0.2\r\n"))
        await asyncio.sleep(0.05)
        third, last = await asyncio.open_connection(*address)
        last.write(REQUEST)
        await answered(second, reader, third)
        for each in (idle, asking, last):
            each.close()

    serve(client)


def serve(client):
    async def main():
        server = uvicorn.Server(uvicorn.Config(app, port=0, http=Hasty, lifespan="off", log_config=None))
        async with running(server.serve()):
            while not server.started:
                await asyncio.sleep(0.01)
            reader, writer = await asyncio.open_connection(*server.servers[0].sockets[0].getsockname())
            await asyncio.wait_for(client(reader, writer), 10)
            writer.close()

    asyncio.run(main())


@pytest.mark.parametrize("before", [b"", REQUEST])
def test_headers_that_trickle_are_ended(before):
    """In the first request, and in one that follows another."""

    async def client(reader, writer):
        writer.write(before)
        await answered(*[reader] * bool(before))
        began = time.monotonic()
        for byte in REQUEST * 20:
            writer.write(bytes([byte]))
            try:
                await writer.drain()
            except ConnectionError:
                break
            if reader.at_eof():
                break
            await asyncio.sleep(0.05)
        assert time.monotonic() - began < 5, "all of it would take thirty seconds"

    serve(client)


@pytest.mark.slow
def test_what_is_asked_for_in_time_may_take_longer():
    async def client(reader, writer):
        for _ in range(2):
            writer.write(REQUEST.replace(b"x\r\n", b"x\r\nWait: 0.5\r\n"))
            await answered(reader)

    serve(client)
