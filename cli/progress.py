"""What goes on, on standard error: a progress bar, where that is a terminal, and notes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from specbuild.runtime.requests.prompt_file import Request


@contextmanager
def bar(*columns: Any) -> Iterator[tuple[Any, Any]]:
    """rich's progress bar of these columns behind a description, and its first task, whose end is not known yet."""
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    console = Console(file=os.fdopen(os.dup(2), "w"))  # its own: a compiler's noise on standard error is not shown
    shown = TextColumn("{task.description}"), *columns, TimeElapsedColumn()
    with Progress(*shown, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress, progress.add_task("loading torch", total=None)


def tell_later_turns(requests: Sequence[Request]) -> None:
    """Say on stderr what of the prompts is not run."""
    later = sum(request.later_turns for request in requests)
    if later:
        click.echo(f"specbuild: only the first of each line's turns is run; {later} later turns are not", err=True)
