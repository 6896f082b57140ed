"""A sample of live texts for `specbuild distill`: a JSON Lines file of bounded size."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path

from specbuild.runtime import Engine
from specbuild.runtime.errors import OutputError, SpecbuildError
from specbuild.serve.request.generation import Generation
from specbuild.serve.telemetry.logs import RequestLog, error_of

BYTES = 32 << 20  # per file; a full file is renamed to NAME-before.jsonl, which replaces the previous one
_QUEUED = 1024  # texts that wait to be written; more are left out


class TextSample:
    """A `Watcher` that writes a share of texts, each with its prompt, to files that only their owner may read."""

    def __init__(self, path: Path, share: float, log: RequestLog, limit: int = BYTES) -> None:
        self.path, self._share, self._log, self._limit = path, share, log, limit
        self._texts = asyncio.Queue[tuple[Engine, str, list[int]]](_QUEUED)

    def ended(self, generation: Generation) -> None:
        """See `Watcher`."""
        if generation.status != 200 or not generation.results or self._texts.full() or random.random() >= self._share:
            return
        choice, result = min(generation.results.items())
        tokens = [*generation.prompts[choice // generation.samples], *result.token_ids]
        self._texts.put_nowait((generation.engine, generation.served.name, tokens))

    async def run(self) -> None:
        """Write texts until cancelled; an error is logged and ends the sample."""
        try:
            while True:
                await asyncio.to_thread(self.add, *await self._texts.get())
                self._texts.task_done()
        except SpecbuildError as error:
            self._share = 0.0
            self._log.event("error", "no more texts are sampled", **error_of(error))

    async def settled(self) -> None:
        """Wait until every text is written; `run` must be running."""
        await self._texts.join()

    def add(self, engine: Engine, model: str, tokens: Sequence[int]) -> None:
        """Append a prompt and its output: the text, for `specbuild distill`, and its token ids. Raises OutputError."""
        line = json.dumps({"text": engine.decode([*tokens]), "token_ids": [*tokens], "model": model}) + "\n"
        try:
            self.path.touch(0o600)
            if self.path.stat().st_size + len(line) > self._limit:
                self.path.replace(self.path.with_name(f"{self.path.stem}-before{self.path.suffix}"))
                self.path.touch(0o600)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            raise OutputError(
                f"{self.path} cannot be written ({error.strerror or error}): give another place"
            ) from None
