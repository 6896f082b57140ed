"""Reads untrusted files: only regular ones of bounded size, with strict JSON, and with errors of one line."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec

from specbuild.runtime.errors import CheckpointError, one_line

JSON_BYTES = 64 << 20  # of a file, at most


class NotRegularError(OSError):
    """A FIFO, device, socket or folder was found in place of a file."""


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Yield a regular file, opened for reading without waiting on a FIFO; raise NotRegularError or another OSError."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise NotRegularError(0, "not a regular file")
        yield file


def read_text(path: Path, limit: int = JSON_BYTES) -> str:
    """Return the text of a file of at most `limit` bytes, without waiting for a writer of a FIFO.

    Raises:
        OSError: The file cannot be opened, or is not a regular file.
        ValueError: It is too large, or not UTF-8.
    """
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise ValueError(f"{size >> 20} MiB, more than {limit >> 20}")
        return file.read(limit).decode()


def decode(text: str) -> Any:
    """Decode JSON; raise ValueError if it is invalid, nested too deeply, or has a number that is too long."""
    try:
        return msgspec.json.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeEncodeError as error:
        raise ValueError(error.reason) from None


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a checkpoint's file, {} if the file is missing; raise CheckpointError for a bad one."""
    try:
        content = decode(read_text(path))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): give a checkpoint of plain files") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error}): download it again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object: download it again")
    return content


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn anything that tokenizers raises into a CheckpointError, even a Rust panic, which is not an Exception.

    `what` begins its message.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise CheckpointError(f"{what}: {one_line(error)}") from None
