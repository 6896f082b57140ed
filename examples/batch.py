"""Answer a file of JSON lines in order; a line that fails becomes a line with its error.

python examples/batch.py pycode.bundle prompts.jsonl results.jsonl

A line has `prompt` and any sampling parameters except `n`. However long the file, only a window of it is in memory.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from specbuild.runtime import Engine, Handle, SamplingParams, SpecbuildError

WINDOW = 64  # lines read ahead of the next one to be written
MALFORMED = "a line is a JSON object with prompt and sampling parameters"


def submit(engine: Engine, line: str) -> Handle | dict[str, Any]:
    """Queue a line's request, waiting while the queue is full; return its handle, or its error."""
    try:
        fields = json.loads(line)
        return engine.submit(fields.pop("prompt"), SamplingParams(**fields))
    except (SpecbuildError, ValueError, TypeError, LookupError, AttributeError) as error:
        reason = str(error) if isinstance(error, SpecbuildError) else f"{MALFORMED}: {error!r}"
        return {"finish_reason": "error", "error": reason}


def results(engine: Engine, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield each line's result, in order."""
    pending: deque[Handle | dict[str, Any]] = deque()

    def first() -> dict[str, Any]:
        head = pending.popleft()
        return head.result().to_dict() if isinstance(head, Handle) else head

    for line in lines:
        pending.append(submit(engine, line))
        if len(pending) > WINDOW:
            yield first()
    while pending:
        yield first()


def main(bundle: str, source: str, target: str) -> int:
    """Run the file; return the exit status, 1 if a line failed."""
    failed = 0
    with (
        Engine.load(bundle, batch_size=4) as engine,
        Path(source).open(encoding="utf-8") as lines,
        Path(target).open("w", encoding="utf-8") as out,
    ):
        for result in results(engine, lines):
            failed += "error" in result
            out.write(json.dumps(result, ensure_ascii=False) + "\n")
    print(f"{failed} lines failed", file=sys.stderr)
    return int(failed > 0)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(f"usage: {sys.argv[0]} BUNDLE IN.jsonl OUT.jsonl")
    try:
        sys.exit(main(*sys.argv[1:]))
    except (SpecbuildError, OSError) as error:
        sys.exit(f"{sys.argv[0]}: {error}")
