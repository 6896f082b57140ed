"""The protocol between run.py and a worker: JSON objects, a line each, on the worker's stdin and stdout.

run.py sends a job, {"target", "draft", "bundle", "threads", "float32", "folder"}, and the worker answers with what it
loaded, {"versions", "settings", "modes"}. Then run.py sends requests, {"mode", "tokens", "n"}, and gets for each
{"tokens", "first", "total"}: the n new tokens, and the seconds from the call to the first and to the last of them. An
answer may be {"error"} instead. The worker ends when its stdin does. It runs in an environment of its own, so this
module needs Python only.
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
    """A loaded peer in a worker. All of its modes decode greedily and go on past an end-of-text token."""

    versions: dict[str, str]
    settings: dict[str, Any]

    @property
    def modes(self) -> Sequence[str]:
        """Names of the modes; those that begin with "plain" do not speculate."""

    def decode(self, mode: str, tokens: list[int], n: int) -> Decoded:
        """Decode `n` tokens after a prompt's `tokens`."""


def serve(load: Callable[[dict[str, Any]], Peer]) -> None:
    """Load the job's peer, then answer requests until stdin ends; exit with status 1 if loading fails."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries must not look like an answer
    lines = (json.loads(line) for line in sys.stdin)

    def answer(make: Callable[[], dict[str, Any]]) -> bool:
        try:
            content, fine = make(), True
        except Exception as error:  # a peer may raise any error
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
