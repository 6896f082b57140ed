"""What goes on, on standard error: nothing where that is no terminal."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def bar(*columns: Any) -> Iterator[tuple[Any, Any]]:
    """rich's progress bar of these columns behind a description, and its first task, whose end is not known yet."""
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    console = Console(file=os.fdopen(os.dup(2), "w"))  # its own: a compiler's noise on standard error is not shown
    shown = TextColumn("{task.description}"), *columns, TimeElapsedColumn()
    with Progress(*shown, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress, progress.add_task("loading torch", total=None)
