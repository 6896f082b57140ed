"""Compiles structured outputs in a process that is killed if one takes too long or too much memory."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from specbuild.runtime.errors import ExecutionError, OptionError, one_line

from .structured import StructuredOutputs
from .vocabulary import Vocabulary

SECONDS = 5.0  # maximum for a grammar
STARTING = 60.0  # maximum seconds for the process to start and read a tokenizer
BYTES = 512 << 20  # maximum memory for a grammar
NICE = 10  # niceness of the process: models go first
_PROGRAM = "import sys; sys.path[:] = {path!r}; from specbuild.runtime.sampling import grammar_process as p; p.main()"


class Compiler:
    """Checks that structured outputs compile within limits, one at a time; safe to use from several threads.

    Its process starts with the first check, starts again after it was killed, and ends with `close`.

    Args:
        vocabulary: Returns the model's vocabulary, when the process starts.
        seconds: Maximum seconds for a grammar.
        memory: Maximum bytes of memory for a grammar.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], seconds: float = SECONDS, memory: int = BYTES) -> None:
        self._vocabulary, self._seconds, self._memory = vocabulary, seconds, memory
        self._lock, self._pid = threading.Lock(), os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None

    def check(self, outputs: StructuredOutputs) -> tuple[str, int]:
        """Compile a structured output in the process.

        Args:
            outputs: The structured output.

        Returns:
            The grammar as llguidance reads it, and the bytes that it takes when compiled.

        Raises:
            OptionError: It cannot be compiled, or not within the limits.
            ExecutionError: The process did not start.
        """
        with self._lock:
            process = self._process or self._start()
            answer = self._ask(process, json.dumps(outputs.to_dict()), self._seconds)
        if answer is None:
            raise OptionError(
                f"structured_outputs takes more than {self._seconds:g} s or {self._memory >> 20} MiB to compile: "
                "give something smaller, with fewer repetitions and choices"
            )
        if "error" in answer:
            raise OptionError(f"structured_outputs cannot be used: {one_line(ValueError(_told(answer['error'])))}")
        return answer["grammar"], answer["bytes"]

    def _start(self) -> subprocess.Popen[bytes]:
        vocabulary = self._vocabulary()
        command = [sys.executable, "-I", "-c", _PROGRAM.format(path=sys.path)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        os.setpriority(os.PRIO_PROCESS, process.pid, max(NICE, os.getpriority(os.PRIO_PROCESS, process.pid)))
        self._process, self._end = process, weakref.finalize(self, _kill, process)
        told = {
            "vocabulary": vocabulary.to_dict(),
            "bytes": self._memory,
            "seconds": int(2 * self._seconds) + 2,
        }
        if self._ask(process, json.dumps(told), STARTING) is None:
            raise ExecutionError("the process that compiles grammars did not start: free memory, or try again")
        return process

    def _ask(self, process: subprocess.Popen[bytes], line: str, seconds: float) -> Any:
        """Return the answer to a line; if none comes within `seconds`, end the process and return None."""
        answer = None
        try:
            answer = _exchange(process, line.encode() + b"\n", time.monotonic() + seconds)
        finally:
            if answer is None:
                self._end()
                self._process = None
        return answer

    def close(self) -> None:
        """End the process, if it runs. A forked child does nothing: whoever holds the lock may not be in it."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._end()
            self._process = None


def _exchange(process: subprocess.Popen[bytes], data: bytes, until: float) -> Any:
    """Write a line and read one; return None if the process ended or did not answer in time."""
    assert process.stdin
    assert process.stdout
    reading, writing, found = process.stdout.fileno(), process.stdin.fileno(), bytearray()
    os.set_blocking(writing, False)
    with selectors.DefaultSelector() as selector:
        selector.register(reading, selectors.EVENT_READ)
        selector.register(writing, selectors.EVENT_WRITE)
        left = memoryview(data)
        while not found.endswith(b"\n"):
            if (seconds := until - time.monotonic()) <= 0:
                return None
            for key, _ in selector.select(seconds):
                if key.fd == reading:
                    if not (more := os.read(reading, 1 << 16)):
                        return None
                    found += more
                else:
                    try:
                        left = left[os.write(writing, left) :]
                    except BrokenPipeError:
                        return None
                    if not left:
                        selector.unregister(writing)
    return json.loads(found)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with process:  # waits, and closes its pipes
        pass


def _told(error: str) -> str:
    """Return llguidance's message, with what to do if it does not know a keyword."""
    return f"{error}: leave it out" if error.startswith(("Unimplemented keys", "Unknown format")) else error
