"""A sample of live texts for `specbuild distill`: a JSON Lines file of bounded size."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from specbuild.runtime import Engine
from specbuild.runtime.errors import OutputError

BYTES = 32 << 20  # per file; a full file is renamed to NAME-before.jsonl, which replaces the previous one


class Sample:
    """Appends texts to files that only their owner may read."""

    def __init__(self, path: Path, limit: int = BYTES) -> None:
        self.path, self._limit = path, limit

    def add(self, engine: Engine, model: str, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """Append a prompt and its output: the text, for `specbuild distill`, and its token ids. Raises OutputError."""
        ids = [*prompt, *tokens]
        line = json.dumps({"text": engine.decode(ids), "token_ids": ids, "model": model}) + "\n"
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
