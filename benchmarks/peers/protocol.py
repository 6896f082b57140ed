"""What run.py and a worker say to each other: JSON objects, a line each, on the worker's stdin and stdout.

run.py sends a job, {"target", "draft", "bundle", "threads", "float32", "folder"}, and is told what was loaded,
{"versions", "settings", "modes"}. Then it sends requests, {"mode", "tokens", "n"}, and gets each one's {"tokens",
"first", "total"}: the n new tokens, and the seconds from the call to the first of them and to the last. {"error"} may
come instead. The worker ends when its stdin does. It runs in an environment of its own: nothing here needs more than
Python.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol


class Decoded(NamedTuple):
    """One request: its new tokens, and the seconds to the first and to the last of them."""

    tokens: list[int]
    first: float
    total: float


class Peer(Protocol):
    """What a worker has loaded, and its ways of decoding: all greedily, past an end-of-text token."""

    versions: dict[str, str]
    settings: dict[str, Any]

    @property
    def modes(self) -> Sequence[str]:
        """By name; without speculation where it begins with "plain"."""

    def decode(self, mode: str, tokens: list[int], n: int) -> Decoded:
        """`n` tokens that follow a prompt's `tokens`."""


def serve(load: Callable[[dict[str, Any]], Peer]) -> None:
    """Load what the job says, then decode until stdin ends."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    lines = (json.loads(line) for line in sys.stdin)

    def answer(make: Callable[[], dict[str, Any]]) -> bool:
        try:
            content, fine = make(), True
        except Exception as error:  # a peer raises whatever it likes
            traceback.print_exc()
            content, fine = {"error": " ".join(str(error).split()) or type(error).__name__}, False
        print(json.dumps(content), file=out, flush=True)
        return fine

    loaded: list[Peer] = []

    def begin() -> dict[str, Any]:
        peer = load(next(lines))
        loaded.append(peer)
        return {"versions": peer.versions, "settings": peer.settings, "modes": list(peer.modes)}

    if not answer(begin):
        sys.exit(1)
    for request in lines:
        answer(lambda request=request: loaded[0].decode(request["mode"], request["tokens"], request["n"])._asdict())
