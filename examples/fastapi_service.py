"""An HTTP service around one engine.

    pip install fastapi uvicorn
    SPECBUILD_BUNDLE=pycode.bundle uvicorn --app-dir examples fastapi_service:app
    curl localhost:8000/generate --json '{"prompt": "def main(", "max_new_tokens": 32, "stream": true}'

The body has `prompt` or `messages`, any sampling parameter, and `stream`, for a line of JSON per chunk instead of one
list of results. 400 says what is wrong with a request, 429 that the queue is full. A client that goes away frees its
slot.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from specbuild.runtime import AsyncEngine, Chat, Chunk, SamplingParams
from specbuild.runtime.errors import InputError, QueueFullError, SpecbuildError


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """The engine lives as long as the service."""
    options = json.loads(os.environ.get("SPECBUILD_OPTIONS", '{"batch_size": 4}'))
    async with await AsyncEngine.load(os.environ["SPECBUILD_BUNDLE"], **options) as app.state.engine:
        yield


app = FastAPI(lifespan=lifespan)


@app.exception_handler(SpecbuildError)
async def refuse(request: Request, error: SpecbuildError) -> JSONResponse:
    """One line, and whose fault it is: 400 the client's, 429 everybody's, 503 ours."""
    status = 400 if isinstance(error, InputError) else 429 if isinstance(error, QueueFullError) else 503
    return JSONResponse({"error": str(error)}, status)


@app.post("/generate")
async def generate(request: Request, body: dict[str, Any]) -> Response:
    """Results as a list, or chunks as lines."""
    engine: AsyncEngine = request.app.state.engine
    streaming = body.pop("stream", False)
    prompt = Chat(body.pop("messages")) if "messages" in body else body.pop("prompt", None)
    if not isinstance(prompt, Chat | str):
        raise InputError("give prompt, a text, or messages")
    try:
        params = SamplingParams(**body)
    except TypeError as error:
        raise InputError(f"unknown field: {error}") from None
    if streaming:
        chunks = engine.stream(prompt, params, wait=False)
        first = await anext(chunks)  # what is wrong is said before the response begins
        return StreamingResponse(lines(first, chunks), media_type="application/x-ndjson")
    work = asyncio.ensure_future(engine.generate(prompt, params, wait=False))
    gone = asyncio.ensure_future(request.receive())  # after the body comes only that the client has gone
    await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
    if not work.done():
        work.cancel()
        return Response(status_code=499)
    gone.cancel()
    return JSONResponse([result.to_dict() for result in work.result()])


async def lines(first: Chunk, chunks: AsyncGenerator[Chunk, None]) -> AsyncIterator[str]:
    """Chunks as JSON lines; the last of each sample has its result."""
    async with aclosing(chunks):
        chunk: Chunk | None = first
        while chunk:
            result = chunk.result.to_dict() if chunk.result else None
            yield json.dumps({"sample": chunk.sample, "text": chunk.text, "result": result}) + "\n"
            chunk = await anext(chunks, None)
