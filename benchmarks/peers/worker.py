"""A worker's process on the side of run.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.peers.protocol import Decoded

HERE = Path(__file__).resolve().parent


class PeerError(Exception):
    """An error of a peer or of the command line; the message is one line."""


class Worker:
    """One peer in a process of its own; `about`: its answer after loading. Raises PeerError if the peer fails."""

    def __init__(self, name: str, python: Path, job: dict[str, Any]) -> None:
        self.name, self.log = name, Path(job["folder"]) / "worker.log"
        script = HERE / f"with_{name.replace('-', '_')}.py"
        with self.log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [python, script],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # a peer may begin processes of its own
                env=os.environ | environment(job["threads"]),
            )
        self.about = self._ask(job)

    @property
    def modes(self) -> list[str]:
        """The names of the peer's modes."""
        modes: list[str] = self.about["modes"]
        return modes

    def decode(self, mode: str, tokens: list[int], n: int) -> Decoded:
        """Decode `n` tokens after a prompt's `tokens`; raise PeerError if it fails or gives another number."""
        decoded = Decoded(**self._ask({"mode": mode, "tokens": tokens, "n": n}))
        if len(decoded.tokens) != n:
            raise PeerError(f"{self.name}, {mode}: {len(decoded.tokens)} tokens where {n} were asked for")
        return decoded

    def _ask(self, content: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended: reading its stdout below will tell
            print(json.dumps(content), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"{self.name}: its worker ended with status {self._process.wait()}: see {self.log}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{self.name}{', ' * ('mode' in content)}{content.get('mode', '')}: {answer['error']}")
        return answer

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if value is None:
            self._process.communicate()
        else:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def environment(threads: int) -> dict[str, str]:
    """Return the environment variables of every worker: threads of OpenMP and MKL, neither hub nor telemetry."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "ORT_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
