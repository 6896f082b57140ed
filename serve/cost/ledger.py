"""The ledger: a line of JSON for every ended request, and lines for the machine's activity in between.

Each row is written by one `write` before its request's response ends, so a killed server has lost no row of an
answered request. A power failure loses the rows since the last sync, which happens once a second. A line that a crash
has cut off stays as it is, and the next row begins on a line of its own.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import date, datetime, timedelta, timezone
from pathlib import Path

from specbuild.measure.cost.rows import MachineRow, RequestRow, Row, line_of, now
from specbuild.runtime.errors import OptionError
from specbuild.serve.request.generation import Generation
from specbuild.serve.request.models import ServedModel
from specbuild.serve.telemetry.logs import RequestLog, error_of

from .options import CostOptions

SYNC_SECONDS = 1.0  # seconds between two syncs
MACHINE_SECONDS = 60.0  # seconds between two rows of the machine


def today() -> date:
    """Return the day in UTC."""
    return datetime.now(timezone.utc).date()


def _until_midnight() -> float:
    """Return the seconds until the next day in UTC begins."""
    moment = datetime.now(timezone.utc)
    midnight = datetime.combine(moment.date() + timedelta(1), datetime.min.time(), timezone.utc)
    return (midnight - moment).total_seconds()


class Ledger:
    """A `Watcher` that writes the rows. For the event loop's thread only; must be closed."""

    def __init__(
        self,
        options: CostOptions,
        log: RequestLog,
        sync_seconds: float = SYNC_SECONDS,
        machine_seconds: float = MACHINE_SECONDS,
        today: Callable[[], date] = today,
    ) -> None:
        """Open the ledger; raises OptionError if no file is given, it is not writable, or another server writes it."""
        if options.ledger is None:
            raise OptionError("a ledger needs a file: give --ledger")
        self._options, self._log, self._path = options, log, options.ledger
        self._sync_seconds, self._machine_seconds, self._today = sync_seconds, machine_seconds, today
        self._server = secrets.token_hex(8)
        self._models: Sequence[ServedModel] = ()
        self._began = time.monotonic()
        self._busy = dict[str, float]()
        self._dirty = False
        try:
            self._file = _opened(self._path)
        except OSError as error:
            told = error.strerror or error
            raise OptionError(f"{self._path} cannot be a ledger ({told}): give another --ledger") from None
        self._day, self._open = today(), True

    def begin(self, models: Sequence[ServedModel]) -> None:
        """Start counting the seconds of these models, which have been loaded and warmed up."""
        self._models = models
        self._began, self._busy = time.monotonic(), self._totals()
        self._write(self._machine())

    def ended(self, generation: Generation) -> None:
        """See `Watcher`; writes a row unless no sample came to its end."""
        if not self._open or not any(result.metrics for result in generation.results.values()):
            return
        try:
            self._write(row_of(generation, self._server))
        except Exception as error:  # a row that cannot be made must not stop other requests
            self._log.event("error", "a request has no row in the ledger", id=generation.request_id, **error_of(error))

    async def run(self) -> None:
        """Sync, rotate and write rows of the machine until cancelled."""
        while True:
            await asyncio.sleep(min(self._sync_seconds, _until_midnight()))
            midnight = self._today() != self._day
            if midnight or time.monotonic() - self._began >= self._machine_seconds:
                self._write(self._machine())
            self._day = self._today()
            if self._full(midnight):
                await asyncio.to_thread(_close, self._rotate())
            elif self._dirty:
                self._dirty = False
                await asyncio.to_thread(os.fsync, self._file)

    def close(self) -> None:
        """Write the last row of the machine and close the file; a second call does nothing."""
        if self._open:
            self._write(self._machine())
            self._open = False
            _close(self._file)

    def _machine(self) -> MachineRow:
        """Return a machine row for the time since the last one, of the day in which that time began."""
        before, began = self._busy, self._began
        moment = now() if self._today() == self._day else f"{self._day}T23:59:59.999+00:00"
        self._began, self._busy = time.monotonic(), self._totals()
        return MachineRow(
            time=moment,
            server=self._server,
            seconds=self._began - began,
            busy_seconds={name: max(total - before.get(name, 0.0), 0.0) for name, total in self._busy.items()},
            price_per_hour=self._options.price_per_hour,
            currency=self._options.currency,
            labels=self._options.labels,
        )

    def _totals(self) -> dict[str, float]:
        """Return the seconds of each model's rounds since it was loaded."""
        return {model.name: model.engine.engine.stats.total for model in self._models}

    def _write(self, row: Row) -> None:
        """Append a row by one `write`; a row that cannot be written goes to the log."""
        line = line_of(row)
        try:
            written = os.write(self._file, line)
            if written < len(line):
                raise OSError(f"{written} of {len(line)} bytes were written")
        except OSError as error:
            self._log.event("error", "a row of the ledger could not be written", row=line.decode(), **error_of(error))
            self._begin_line()
        self._dirty = True

    def _begin_line(self) -> None:
        try:
            os.write(self._file, b"\n")
        except OSError:  # the next row logs the error
            return

    def _full(self, midnight: bool) -> bool:
        max_bytes = self._options.max_bytes
        by_day = self._options.ledger_rotate == "day" and midnight
        return by_day or (max_bytes is not None and os.fstat(self._file).st_size >= max_bytes)

    def _rotate(self) -> int:
        """Move the file aside and begin another one; return the old file's descriptor, which is to be closed."""
        old, moment = self._file, f"{datetime.now(timezone.utc):%Y%m%dT%H%M%S%f}"
        aside = self._path.with_name(f"{self._path.stem}-{moment}{self._path.suffix}")
        try:
            self._path.rename(aside)
            self._file = _opened(self._path)
        except OSError as error:
            self._log.event("error", "the ledger could not be rotated", **error_of(error))
            return os.dup(old)
        self._write(self._machine())
        return old


def row_of(generation: Generation, server: str) -> RequestRow:
    """Return a request's row: all of its samples together."""
    own = [result.metrics for result in generation.results.values() if result.metrics]
    stats, engine = [each.speculative_decoding for each in own], generation.engine
    plain = sum(each.plain_time for each in own)
    return RequestRow(
        time=now(),
        server=server,
        request_id=generation.request_id,
        model=generation.served.name,
        user=generation.body.user,
        tenant=generation.tenant,
        arm=generation.arm,
        speculation=own[0].speculation,
        finish_reasons=dict(Counter(result.finish_reason for result in generation.results.values())),
        prompt_tokens=sum(each.num_prompt_tokens for each in own),
        cached_tokens=sum(each.num_cached_tokens for each in own),
        output_tokens=sum(each.num_output_tokens for each in own),
        draft_tokens=sum(each.num_draft_tokens for each in stats),
        accepted_tokens=sum(each.num_accepted_draft_tokens for each in stats),
        busy_seconds=max(sum(each.busy_time for each in own), 0.0),
        plain_seconds=max(plain, 0.0) if math.isfinite(plain) else None,
        correction=engine.correction,
    )


def _opened(path: Path) -> int:
    """Open a ledger for appending, locked against other servers; end the line of a row that was cut off."""
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError("another server writes it") from None
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            os.write(file, b"\n")
    except OSError:
        os.close(file)
        raise
    return file


def _close(file: int) -> None:
    """Sync a file and close it."""
    try:
        os.fsync(file)
    finally:
        os.close(file)
