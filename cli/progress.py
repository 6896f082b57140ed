"""Progress of a command on standard error: a bar on a terminal, elsewhere a line every ten seconds."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import IO

import click

from specbuild.runtime.requests.prompt_file import Request

from .standard_streams import tell

INTERVAL = 10.0  # seconds between lines
Clock = Callable[[], float]

quiet_option = click.option("-q", "--quiet", is_flag=True, help="Show no progress on standard error.")


@dataclass(frozen=True, slots=True)
class _Count:
    """A counted activity: its name, when it began, and how many items are done of how many."""

    what: str
    began: float
    first: float = 0  # items already done when it began
    done: float = 0
    total: int = 0  # 0: unknown
    unit: str = ""
    note: str = ""


class Progress:
    """The current activity of a command, how much of it is done, and an estimate of the time left."""

    def __init__(self, command: str, clock: Clock = time.monotonic) -> None:
        self._command, self._clock = command, clock
        self._listen: Callable[[_Count], object] = lambda count: None
        self._count = _Count("starting", clock())  # replaced as a whole: another thread reads it

    def begin(self, what: str, total: int = 0, unit: str = "", done: float = 0) -> None:
        """Begin a new count.

        Args:
            what: The activity.
            total: Items in all; 0 if unknown.
            unit: What the items are.
            done: Items that an earlier run has done.
        """
        self._set(_Count(what, self._clock(), done, done, total, unit))

    def update(self, done: float, what: str | None = None, note: str = "") -> None:
        """Set the number of items done, and optionally the current activity's name and a note on it."""
        self._set(replace(self._count, done=done, what=self._count.what if what is None else what, note=note))

    def tell(self, what: str, done: int, total: int, note: str = "", unit: str = "") -> None:
        """Set the state of an activity; a new name begins a new count.

        Args:
            what: The activity.
            done: Items done.
            total: Items in all; 0 if unknown.
            note: A note on the activity.
            unit: What the items are.
        """
        if what != self._count.what:
            self.begin(what, total, unit, done)
        self.update(done, note=note)

    def listen(self, listener: Callable[[_Count], object]) -> None:
        """Call `listener` with the current count now and after each change."""
        self._listen = listener
        listener(self._count)

    def line(self) -> str:
        """Describe on one line what is done and how long the rest takes."""
        count, elapsed = self._count, self._clock() - self._count.began
        doing = f"{count.what} ({count.note})" if count.note else count.what
        parts = [f"{int(count.done)} of {count.total} {count.unit}".rstrip()] if count.total else []
        if count.first < count.done < count.total:
            left = elapsed * (count.total - count.done) / (count.done - count.first)
            parts.append(f"about {in_words(left)} left")
        else:
            parts.append(f"{in_words(elapsed)} so far")
        return f"{self._command}, {doing}: {', '.join(parts)}"

    def _set(self, count: _Count) -> None:
        self._count = count
        self._listen(count)


def in_words(seconds: float) -> str:
    """Return a time in words: "40 s", "3 min", "2.2 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


@contextmanager
def showing(
    command: str, quiet: bool, interval: float | None = None, clock: Clock = time.monotonic
) -> Iterator[Progress]:
    """Yield a command's progress, shown on standard error in the meantime.

    Args:
        command: The command's name.
        quiet: Whether nothing is shown.
        interval: Seconds between lines where standard error is no terminal; None for INTERVAL.
        clock: The clock.
    """
    progress = Progress(command, clock)
    if quiet:
        yield progress
        return
    # A duplicate of the descriptor: descriptor 2 itself may be redirected to hide a compiler's output.
    with (
        os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace") as file,
        contextlib.ExitStack() as stack,
    ):
        stack.enter_context(_bar(progress, file) if file.isatty() else _lines(progress, file, interval or INTERVAL))
        yield progress


@contextmanager
def _bar(progress: Progress, file: IO[str]) -> Iterator[None]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Bar(
        TextColumn("{task.description}", markup=False),
        *columns,
        console=Console(file=file),
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # output on the same terminal is printed above the bar
    ) as bar:
        task, counted = bar.add_task("", total=None), 0.0

        def show(count: _Count) -> None:
            nonlocal task, counted
            if count.began != counted:
                bar.remove_task(task)
                task, counted = bar.add_task("", total=None, completed=int(count.first)), count.began
            words = f"{count.what}: {count.note}" if count.note else count.what
            bar.update(task, description=words, completed=count.done, total=count.total or None)

        progress.listen(show)
        yield


@contextmanager
def _lines(progress: Progress, file: IO[str], interval: float) -> Iterator[None]:
    ended = threading.Event()

    def run() -> None:
        with contextlib.suppress(OSError):  # standard error was closed
            while not ended.wait(interval):
                os.write(file.fileno(), f"specbuild: {progress.line()}\n".encode(errors="backslashreplace"))

    thread = threading.Thread(target=run, name="specbuild-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def tell_later_turns(requests: Sequence[Request]) -> None:
    """Say on standard error how many later turns of the requests are not run, if any."""
    later = sum(request.later_turns for request in requests)
    if later:
        tell(f"only the first of each line's turns is run; {later} later turns are not")
