"""A server's log: a line of JSON for every request that has ended, and for every other event."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import traceback
from datetime import datetime, timezone
from typing import Any, TextIO

from specbuild.runtime.errors import message_of

MAX_TEXT = 2000  # maximum characters of a value
DEBUG = "SPECBUILD_DEBUG"  # environment variable: if set, errors have their tracebacks
LOGGERS = ("specbuild", "uvicorn", "asyncio", "opentelemetry")
_SENT = ("prompt", "text")  # fields with users' prompts and their answers


class RequestLog:
    """Writes lines, from any thread; `log_requests`: whether with prompts and texts. Never raises."""

    def __init__(self, stream: TextIO, log_requests: bool = False) -> None:
        self._stream, self.log_requests = stream, log_requests
        self._lock = threading.RLock()  # a finalizer may log while its own thread writes a line

    def ended(self, **told: Any) -> None:
        """Log a request that has ended."""
        failed = isinstance(told.get("status"), int) and told["status"] >= 500
        shown = {name: value for name, value in told.items() if self.log_requests or name not in _SENT}
        self.event("error" if failed else "info", "request", **shown)

    def event(self, level: str, message: str, **told: Any) -> None:
        """Log an event; fields that are None are left out."""
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        line = {"time": now, "level": level, "message": message, **told}
        try:
            shown = {name: _log_value(value) for name, value in line.items() if value is not None}
            text = json.dumps(shown, default=str)
            with self._lock:
                self._stream.write(text + "\n")
                self._stream.flush()
        except Exception:  # the log's reader is gone; requests are still served
            return


def _log_value(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else str(value)
    return value[:MAX_TEXT] if isinstance(value, str) else value


def error_of(error: BaseException) -> dict[str, str]:
    """Return an exception as fields of a line: kind, message and, if SPECBUILD_DEBUG is set, its traceback's end."""
    told = {"error": f"{type(error).__name__}: {message_of(error)}"}
    if os.environ.get(DEBUG):
        told["traceback"] = "".join(traceback.format_exception(error))[-MAX_TEXT:]
    return told


class Records(logging.Handler):
    """Writes the records of libraries into the same log. Never raises."""

    def __init__(self, log: RequestLog) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`; logs a message's first line, and an exception's `error_of`."""
        error = record.exc_info[1] if record.exc_info else None
        try:
            said = record.getMessage()
        except Exception:  # the arguments do not fit the message
            said = record.msg if isinstance(record.msg, str) else type(record.msg).__name__
        told = error_of(error) if error else {}
        self._log.event(record.levelname.lower(), said.strip().partition("\n")[0], logger=record.name, **told)


def install(log: RequestLog) -> None:
    """Send warnings of specbuild, of the HTTP server, of asyncio and of exporters to the log."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [Records(log)], False
