"""A lock that admits one writer of an output at a time, and removes what killed writers left behind."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from specbuild.runtime.errors import OutputError

NEW, OLD, ASIDE = "new", "old", "replaced"  # a folder being written; a folder with the replaced output as ASIDE
_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # a file system without locks


def beside(output: Path, what: str) -> str:
    """Return a hidden name beside an output."""
    return f".{output.name}.{what}"


@contextmanager
def only_writer(output: Path) -> Iterator[None]:
    """Keep other processes on this machine from writing the output, after removing what killed writers left beside it.

    An output that a killed writer had moved aside is moved back. Raises OutputError, naming the process that writes
    now.
    """
    path = output.absolute().with_name(beside(output, "lock"))
    file = _locked(path, output)
    try:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
        _clean(output.absolute())
        yield
    finally:
        path.unlink(missing_ok=True)
        file.close()


def _locked(path: Path, output: Path) -> IO[str]:
    """Return the locked lock file, still the one of that name: its last holder may have removed it meanwhile."""
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read() or "another process"
            file.close()
            raise OutputError(f"{output} is being written by {holder}: wait for it, or give another --output") from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
        if _same(file, path):
            return file
        file.close()


def _same(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _clean(output: Path) -> None:
    """Remove what only dead writers can have left, after moving back an output that one had moved aside."""
    name = re.compile(re.escape(beside(output, "")) + f"({NEW}|{OLD})-[a-z0-9_]{{8}}(\\..*)?")  # tempfile's suffix
    for found in [path for path in output.parent.iterdir() if name.fullmatch(path.name) and path.is_dir()]:
        if (found / ASIDE).is_dir() and not output.exists():
            (found / ASIDE).rename(output)
        shutil.rmtree(found, ignore_errors=True)
