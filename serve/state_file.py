"""State that a server keeps across restarts: JSON files that are written completely or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specbuild.runtime.bundle.atomic_output import write
from specbuild.runtime.checked_json import JSON_BYTES, decode
from specbuild.runtime.errors import OptionError, OutputError


def load(path: Path, of: dict[str, Any]) -> dict[str, Any] | None:
    """Return the state that `store` has written; None if there is no file yet.

    Args:
        path: The state file.
        of: Names and values that identify what the state belongs to; the file must contain them.

    Raises:
        OptionError: If the file cannot be read or belongs to something else.
    """
    try:
        with path.open("rb") as file:
            body = decode(file.read(JSON_BYTES))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OptionError(f"{path} cannot be read ({error.strerror or error}): give another file") from None
    except ValueError as error:
        raise OptionError(f"{path} cannot be read as JSON ({error}): give another file, or remove it") from None
    given = body if isinstance(body, dict) else {}
    for name, value in of.items():
        if given.get(name) != value:
            told = f"{name} is {str(given.get(name))[:80]!r} there, {str(value)[:80]!r} here"
            raise OptionError(f"{path} is of something else ({told}): give another file, or remove it")
    return given


def store(path: Path, of: dict[str, Any], body: dict[str, Any]) -> None:
    """Write a state, and `of`, which identifies what it belongs to, with mode 0600; raises OutputError.

    A state that `load` could not read back is refused, so that the one before stays.
    """
    content = (json.dumps({**of, **body}, allow_nan=False) + "\n").encode()
    if len(content) > JSON_BYTES:
        raise OutputError(f"{path} would have {len(content) >> 20} MiB, more than {JSON_BYTES >> 20}: keep less")
    write(path, content, 0o600)


def unusable(path: Path, error: Exception) -> OptionError:
    """Return the error for a file whose contents are not a valid state."""
    return OptionError(f"{path} is no state ({type(error).__name__}: {error}): give another file, or remove it")
