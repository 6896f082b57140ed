"""Generate for a file of JSON lines and write the results in order; a line that fails becomes a line with its error.

    python examples/batch.py pycode.bundle prompts.jsonl results.jsonl

A line has `prompt` and any sampling parameters except `n`. Only a window of the file is in memory, however long it is.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import rich.progress
from rich.console import Console

from specbuild.runtime import Engine, Handle, SamplingParams, SpecbuildError

WINDOW = 64  # lines read ahead of the next one to be written


def submit(engine: Engine, line: str) -> Handle | dict[str, Any]:
    """Submit a line's request; return its handle, or the outcome if the line is invalid."""
    try:
        fields: Any = None
        with suppress(json.JSONDecodeError):
            fields = json.loads(line)
        unknown = set(fields) - SamplingParams.names() - {"prompt"} if isinstance(fields, dict) else set()
        if not isinstance(fields, dict) or "prompt" not in fields or unknown:
            raise ValueError(f"a line is a JSON object with prompt and sampling parameters, not {line.strip():.60}")
        return engine.submit(fields.pop("prompt"), SamplingParams(**fields))
    except (SpecbuildError, ValueError) as error:
        return {"finish_reason": "error", "error": str(error)}


def outcomes(engine: Engine, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield an outcome per line, in order."""
    pending: deque[Handle | dict[str, Any]] = deque()

    def first() -> dict[str, Any]:
        head = pending.popleft()
        return head.result().to_dict() if isinstance(head, Handle) else head

    for line in lines:
        pending.append(submit(engine, line))  # waits while the engine's queue is full
        if len(pending) > WINDOW:
            yield first()
    while pending:
        yield first()


def main(bundle: str, source: str, target: str) -> int:
    """Run the file; return the exit status, 1 if a line failed."""
    failed = 0
    with (
        Engine.load(bundle, batch_size=4) as engine,
        rich.progress.open(source, encoding="utf-8", description=source, console=Console(stderr=True)) as lines,
        Path(target).open("w", encoding="utf-8") as out,
    ):
        for outcome in outcomes(engine, lines):
            failed += "error" in outcome
            out.write(json.dumps(outcome, ensure_ascii=False) + "\n")
    print(f"{failed} lines failed" if failed else "no line failed", file=sys.stderr)
    return int(failed > 0)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(f"usage: {sys.argv[0]} BUNDLE IN.jsonl OUT.jsonl")
    try:
        sys.exit(main(*sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit("interrupted: what was written is whole lines")
    except (SpecbuildError, OSError) as error:
        sys.exit(f"{sys.argv[0]}: {error}")
