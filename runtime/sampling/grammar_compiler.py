"""Compiles structured outputs in processes, each killed if a grammar takes too long or too much memory."""

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
NICE = 10  # niceness of the processes: models go first
IDLE = 2  # processes that wait for another grammar: one is ready while the other has a slow one
_PROGRAM = "import sys; sys.path[:] = {path!r}; from specbuild.runtime.sampling import grammar_process as p; p.main()"


class Compiler:
    """Checks that structured outputs compile within limits; safe to use from several threads.

    Each check has a process to itself, so none waits for another. Processes start when they are needed, and IDLE of
    them stay for later checks.

    Args:
        vocabulary: Returns the model's vocabulary, when a process starts.
        seconds: Maximum seconds for a grammar.
        memory: Maximum bytes of memory for a grammar.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], seconds: float = SECONDS, memory: int = BYTES) -> None:
        self._vocabulary, self._seconds, self._memory = vocabulary, seconds, memory
        self._lock, self._pid = threading.Lock(), os.getpid()
        self._idle, self._closed = list[_Process](), False

    def check(self, outputs: StructuredOutputs) -> tuple[str, int]:
        """Compile a structured output in a process.

        Args:
            outputs: The structured output.

        Returns:
            The grammar as llguidance reads it, and the bytes that it takes when compiled.

        Raises:
            OptionError: It cannot be compiled, or not within the limits.
            ExecutionError: The process did not start.
        """
        process = self._take() or self._start()
        answer = process.ask(json.dumps(outputs.to_dict()), self._seconds)
        if answer is None:
            raise OptionError(
                f"structured_outputs takes more than {self._seconds:g} s or {self._memory >> 20} MiB to compile: "
                "give something smaller, with fewer repetitions and choices"
            )
        self._return(process)
        if "error" in answer:
            raise OptionError(f"structured_outputs cannot be used: {one_line(ValueError(_message(answer['error'])))}")
        return answer["grammar"], answer["bytes"]

    def _take(self) -> _Process | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _return(self, process: _Process) -> None:
        with self._lock:
            if len(self._idle) < IDLE and not self._closed:
                self._idle.append(process)
                return
        process.end()

    def _start(self) -> _Process:
        process = _Process()
        told = {
            "vocabulary": self._vocabulary().to_dict(),
            "bytes": self._memory,
            "seconds": int(2 * self._seconds) + 2,
        }
        if process.ask(json.dumps(told), STARTING) is None:
            raise ExecutionError("the process that compiles grammars did not start: free memory, or try again")
        return process

    def close(self) -> None:
        """End the processes, each when its check is done. A forked child does nothing: they are not its own."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed, idle, self._idle = True, self._idle, []
        for process in idle:
            process.end()


class _Process:
    """A process that compiles a line at a time; it ends with `end`, and with this object."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", "-c", _PROGRAM.format(path=sys.path)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self.end = weakref.finalize(self, _kill, self._process)
        number = self._process.pid
        os.setpriority(os.PRIO_PROCESS, number, max(NICE, os.getpriority(os.PRIO_PROCESS, number)))

    def ask(self, line: str, seconds: float) -> Any:
        """Return the answer to a line; if none comes within `seconds`, end the process and return None."""
        answer = None
        try:
            answer = _exchange(self._process, line.encode() + b"\n", time.monotonic() + seconds)
        finally:
            if answer is None:
                self.end()
        return answer


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


def _message(error: str) -> str:
    """Return llguidance's message, with what to do if it does not know a keyword."""
    return f"{error}: leave it out" if error.startswith(("Unimplemented keys", "Unknown format")) else error
