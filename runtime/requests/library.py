"""Calls into `tokenizers`, whose Rust code may panic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specbuild.runtime.errors import SpecbuildError, message_of


def call(kind: type[SpecbuildError], what: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call the library; raise `kind` for any error, a panic of its Rust code included, which is not an Exception."""
    try:
        return function(*args, **options)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise kind(f"{what}: {message_of(error) or type(error).__name__}") from error
