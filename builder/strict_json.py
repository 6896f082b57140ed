"""Files that somebody else wrote: regular, of bounded size, their JSON read strictly, and refused in one line."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec

from specbuild.runtime.errors import CheckpointError, one_line

JSON_BYTES = 64 << 20  # of a file


class NotRegularError(OSError):
    """A FIFO, device, socket or folder where a file was to be read."""


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """A regular file, to be read; raises NotRegularError, and OSError. A FIFO is not waited for."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise NotRegularError(0, "not a regular file")
        yield file


def read_text(path: Path, limit: int = JSON_BYTES) -> str:
    """A file's text; raises OSError for what cannot be opened or is no regular file, else ValueError.

    A FIFO is opened without waiting for whoever would write to it.
    """
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise ValueError(f"{size >> 20} MiB, more than {limit >> 20}")
        return file.read(limit).decode()


def decode(text: str) -> Any:
    """What JSON says; raises ValueError also where it is too deep, or has a number that is too long."""
    try:
        return msgspec.json.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeEncodeError as error:
        raise ValueError(error.reason) from None


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object of a checkpoint; empty where there is no such file. Raises CheckpointError."""
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
    """Make whatever tokenizers raises a CheckpointError, a panic too, which is no Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise CheckpointError(f"{what}: {one_line(error)}") from None
