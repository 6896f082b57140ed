"""Stream texts from a FastAPI application of your own; a client that leaves frees its slot.

BUNDLE=pycode.bundle uvicorn --app-dir examples web:app
curl -N localhost:8000/generate -H 'Content-Type: application/json' -d '{"prompt": "def main(", "max_new_tokens": 64}'
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel

from specbuild import AsyncEngine, SamplingParams
from specbuild.runtime.errors import QueueFullError, SpecbuildError


class Generation(BaseModel):
    """A request's body."""

    prompt: str
    max_new_tokens: int = 128


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, AsyncEngine]]:
    """Load the engine before the first request, and close it after the last."""
    async with await AsyncEngine.load(os.environ["BUNDLE"], batch_size=4, max_waiting=16) as engine:
        yield {"engine": engine}


app = FastAPI(lifespan=lifespan)


@app.exception_handler(SpecbuildError)
async def refuse(request: Request, error: SpecbuildError) -> JSONResponse:
    """Answer a request that cannot run with one line that says why."""
    return JSONResponse({"error": str(error)}, 503 if isinstance(error, QueueFullError) else 400)


@app.post("/generate")
async def generate(body: Generation, request: Request) -> StreamingResponse:
    """Stream a text; what is wrong with the request is raised before the response begins."""
    chunks = request.state.engine.stream(body.prompt, SamplingParams(max_new_tokens=body.max_new_tokens), wait=False)
    first = await anext(chunks)

    async def texts() -> AsyncIterator[str]:
        async with aclosing(chunks):
            yield first.text
            async for chunk in chunks:
                yield chunk.text

    return StreamingResponse(texts(), media_type="text/plain")
