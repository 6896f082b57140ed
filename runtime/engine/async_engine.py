"""The engine's twin for asyncio."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING

from specbuild.runtime.requests.result import Chunk, Result
from specbuild.runtime.requests.validation import Errors, Params, Prompts

from .engine import DEFAULTS, Engine
from .load_options import LoadKeywords, LoadOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AsyncEngine:
    """`generate` and `stream` of an engine, to be awaited; the event loop never waits for the model or the queue.

    Cancelling the task, or leaving the `async for`, cancels the requests and frees their slots.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @classmethod
    async def load(
        cls, path: str | os.PathLike[str], options: LoadOptions = DEFAULTS, **given: Unpack[LoadKeywords]
    ) -> AsyncEngine:
        """Load a bundle in a thread; see `Engine.load`."""
        return cls(await asyncio.to_thread(Engine.load, path, options, **given))

    async def generate(
        self, prompts: Prompts, params: Params = None, *, errors: Errors = "raise", wait: bool = True
    ) -> list[Result]:
        """The results of `Engine.generate`.

        wait=False raises QueueFullError where the first of the requests finds no room in the queue.
        """
        results: dict[tuple[int, int], Result] = {}
        async with aclosing(self._chunks(prompts, params, errors, wait, each_round=False)) as chunks:
            async for chunk in chunks:
                if chunk.result:
                    results[chunk.index, chunk.sample] = chunk.result
        return [results[key] for key in sorted(results)]

    def stream(
        self, prompts: Prompts, params: Params = None, *, errors: Errors = "raise", wait: bool = True
    ) -> AsyncGenerator[Chunk, None]:
        """The chunks of `Engine.stream`; an error is raised in place of the first chunk. `wait`: as in `generate`."""
        return self._chunks(prompts, params, errors, wait, each_round=True)

    async def _chunks(
        self, prompts: Prompts, params: Params, errors: Errors, wait: bool, each_round: bool
    ) -> AsyncGenerator[Chunk, None]:
        sequences, refused = await asyncio.to_thread(self.engine.requests, prompts, params, errors)
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(changed.set)
            except RuntimeError:  # the event loop is closed, and nobody waits any more
                window.cancel()

        window = self.engine.window(sequences, wake, each_round)
        try:
            window.fill(wait)
            for chunk in refused:
                yield chunk
            while window.pending:
                changed.clear()
                for chunk in window.chunks():
                    yield chunk
                if window.pending:
                    await changed.wait()
        finally:
            window.cancel()

    async def drain(self, timeout: float | None = None) -> bool:
        """Finish the requests there are and close, in a thread; see `Engine.drain`."""
        return await asyncio.to_thread(self.engine.drain, timeout)

    async def close(self) -> None:
        """Close the engine, in a thread: a round may be under way."""
        await asyncio.to_thread(self.engine.close)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
