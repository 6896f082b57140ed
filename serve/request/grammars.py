"""Compiles the grammars that requests ask for, each beside all others."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from specbuild.runtime import Constraint, Engine, StructuredOutputs
from specbuild.serve.errors import ApiError

COMPILING = 8
WAIT_SECONDS = 1.0  # a grammar may take five


class GrammarCompiler:
    """Compiles a few grammars at once and refuses more, so that none waits for slow ones. For the event loop only.

    Args:
        max_compiling: Grammars at once, each in a process that may take hundreds of megabytes.
        wait_seconds: How long another one waits for one of them to end.
    """

    def __init__(self, max_compiling: int = COMPILING, wait_seconds: float = WAIT_SECONDS) -> None:
        self._pool = ThreadPoolExecutor(max_compiling, "specbuild-compile")
        self._room = asyncio.Semaphore(max_compiling)
        self._most, self._wait_seconds = max_compiling, wait_seconds

    async def constraint(self, engine: Engine, outputs: StructuredOutputs) -> Constraint:
        """Return a new constraint, which stays cached while it is held; raises ApiError 429 and OptionError."""
        try:
            await asyncio.wait_for(self._room.acquire(), self._wait_seconds)
        except (TimeoutError, asyncio.TimeoutError):
            told = f"{self._most} slow grammars are being compiled, as many as may: try again later"
            raise ApiError(429, told, code="grammars_busy") from None
        compiling = asyncio.get_running_loop().run_in_executor(self._pool, partial(engine.constraint, outputs))
        compiling.add_done_callback(lambda _: self._room.release())  # also where its client has left
        return await asyncio.shield(compiling)
