"""Silences libraries while specbuild works: their messages for developers do not help specbuild's users."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as bars


@contextmanager
def only_errors(library: str, least: int = logging.ERROR) -> Iterator[None]:
    """Hide a library's log messages below a level, by default its warnings."""
    logger = logging.getLogger(library)
    level = logger.level
    logger.setLevel(least)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def quiet() -> Iterator[None]:
    """Hide `transformers`' warnings and progress bars, in a block or, as a decorator, in a function's calls."""
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        with only_errors("transformers"):
            yield
    finally:
        if shown:
            bars.enable_progress_bar()
