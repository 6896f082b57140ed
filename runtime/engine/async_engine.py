"""`AsyncEngine`: an `Engine` for asyncio."""

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
    """An engine for asyncio: `generate` is awaited and `stream` is iterated with `async for`.

    The event loop never blocks on the model or the queue. Cancelling the task, or leaving the `async for`, cancels the
    requests and frees their slots. It is an async context manager; leaving it closes the engine.

    Example:
        import asyncio

        from specbuild import AsyncEngine, SamplingParams


        async def main() -> None:
            async with await AsyncEngine.load("pycode.bundle", batch_size=2) as engine:
                async for chunk in engine.stream("def main(", SamplingParams(max_new_tokens=64)):
                    print(chunk.text, end="", flush=True)


        asyncio.run(main())

    Attributes:
        engine: The `Engine` that runs the requests.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @classmethod
    async def load(
        cls, path: str | os.PathLike[str], options: LoadOptions = DEFAULTS, **given: Unpack[LoadKeywords]
    ) -> AsyncEngine:
        """Load a bundle in a thread, checking its files' hashes; see `Engine.load`.

        Args:
            path: The bundle's folder.
            options: How to load the bundle and serve requests.
            **given: Fields of `LoadOptions`; they override those of `options`.

        Returns:
            The loaded engine.

        Raises:
            BundleError: The bundle is missing, damaged, unsafe or too new.
            OptionError: An option is out of range or does not suit the bundle.
            ExecutionError: The bundle needs a GPU and there is none.
        """
        return cls(await asyncio.to_thread(Engine.load, path, options, **given))

    async def generate(
        self, prompts: Prompts, params: Params = None, *, errors: Errors = "raise", wait: bool = True
    ) -> list[Result]:
        """Decode every prompt and return the results; see `Engine.generate`.

        Args:
            prompts: A text, a list of token ids, a Chat or its messages; or a list of such prompts.
            params: Sampling parameters for all prompts, or a list with one for each; None: the defaults.
            errors: "raise" an error in a prompt or its parameters before anything runs, or "return" it as the results
                of that prompt.
            wait: Whether to wait for room in the queue.

        Returns:
            The results in the prompts' order, the n samples of a prompt one after another. An error while a request
            runs is in its result.

        Raises:
            PromptError: A prompt cannot be used, and `errors` is "raise".
            OptionError: A parameter cannot be used, and `errors` is "raise".
            QueueFullError: `wait` is False and the queue has no room for the first request.
            EngineClosedError: The engine is closed or draining.
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
        """Yield chunks as the texts grow; see `Engine.stream`.

        Args:
            prompts: As in `generate`.
            params: As in `generate`.
            errors: As in `generate`.
            wait: As in `generate`.

        Returns:
            An async iterator over chunks; the last chunk of each sample has its result. Errors that `generate` raises
            are raised in place of the first chunk.
        """
        return self._chunks(prompts, params, errors, wait, each_round=True)

    async def _chunks(
        self, prompts: Prompts, params: Params, errors: Errors, wait: bool, each_round: bool
    ) -> AsyncGenerator[Chunk, None]:
        sequences, refused = await asyncio.to_thread(self.engine.requests, prompts, params, errors)
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(changed.set)
            except RuntimeError:  # the event loop is closed, so nothing waits for the requests any more
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
        """Refuse new requests, finish those under way, then close the engine; see `Engine.drain`.

        Args:
            timeout: Seconds after which the remaining requests are cancelled; None: never.

        Returns:
            Whether every request finished.

        Raises:
            EngineClosedError: The process is a forked child of the one that loaded the engine.
        """
        return await asyncio.to_thread(self.engine.drain, timeout)

    async def close(self) -> None:
        """Close the engine in a thread, because closing waits for the round under way; see `Engine.close`."""
        await asyncio.to_thread(self.engine.close)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
