"""What tests of the server share."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

CHAT_TEMPLATE = (
    "{% for message in messages %}# {{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% for tool in tools or () %}# tool: {{ tool | tojson }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ prefix | default('def ') }}{% endif %}"
)


class Log:
    """What a server would write."""

    def __init__(self):
        self.lines: list[dict[str, Any]] = []

    def ended(self, **told):
        self.lines.append(told)

    def event(self, level, message, **told):
        self.lines.append({"level": level, "message": message, **told})


def until(holds, seconds=60):
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.01)


@asynccontextmanager
async def running(*works):
    """`async with running(watcher.run()):` has what runs for ever run meanwhile, and cancels it then."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Server:
    """A server in a process of its own; `url` is where it serves, `lines` its log."""

    def __init__(self, *arguments, program=(), env=None):
        command = [*(program or [str(Path(sys.executable).parent / "specbuild")]), "serve", *arguments]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=os.environ | dict(env or {})
        )
        self.lines: list[dict[str, Any]] = []
        self.other: list[str] = []  # lines that are no JSON
        self.url, self._told = "", threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._told.wait(60), "it neither serves nor ends"
        assert self.url, self.other

    def _read(self):
        assert self.process.stderr
        for line in self.process.stderr:
            if not line.startswith("{"):
                self.other.append(line)
                continue
            told = json.loads(line)
            self.lines.append(told)
            if told["message"].startswith("serving at "):
                self.url = told["message"].removeprefix("serving at ")
                self._told.set()
        self._told.set()

    def client(self, **given):
        """An HTTP client of it."""
        if self.url.startswith("unix:"):
            transport = httpx.HTTPTransport(uds=self.url.removeprefix("unix:"))
            return httpx.Client(transport=transport, base_url="http://server", timeout=60, **given)
        return httpx.Client(base_url=self.url, timeout=60, **given)

    def signal(self, number):
        """Send it a signal."""
        self.process.send_signal(number)

    def wait(self, seconds=60):
        """Its exit status, once it has ended and its log is read."""
        status = self.process.wait(seconds)
        self._reader.join(10)
        return status

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.wait()
