"""Silence, for as long as we work: what libraries tell their own developers is no answer to our users."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as bars


@contextmanager
def only_errors(library: str, least: int = logging.ERROR) -> Iterator[None]:
    """A library's log without its warnings, or without all below another level."""
    logger = logging.getLogger(library)
    level = logger.level
    logger.setLevel(least)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def quiet() -> Iterator[None]:
    """`transformers` without warnings and progress bars, for a block or, as a decorator, for a function's calls."""
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        with only_errors("transformers"):
            yield
    finally:
        if shown:
            bars.enable_progress_bar()
