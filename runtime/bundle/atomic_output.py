"""Whatever is written: made beside its place, and renamed into it when all is done."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specbuild.runtime.errors import OutputError

from .manifest import MANIFEST


def check_output(output: Path, force: bool, mark: str = MANIFEST, kind: str = "bundle") -> None:
    """Before minutes are spent: may a folder of this kind, which has a file `mark`, go there? Raises OutputError."""
    try:
        output.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise _output_error(output, error) from error
    if output.is_symlink() or not output.is_dir():
        raise OutputError(f"{output} exists and is not a folder: give another --output")
    if not force:
        raise OutputError(f"{output} exists: give --force to replace it, or another --output")
    if any(output.iterdir()) and not (output / mark).is_file():
        raise OutputError(f"{output} exists and is not a {kind}, so --force will not replace it: give another --output")


def write(path: Path, content: bytes) -> None:
    """All of a file or none of it: written beside its place, renamed into it. Raises OutputError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        raise OutputError(f"{path} cannot be written ({error.strerror or error}): give another place") from error
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def staging(output: Path, size: int) -> Iterator[Path]:
    """A hidden folder beside the output, renamed to it at the end; removed whatever happens. `size`: bytes to come."""
    made: list[Path] = []
    folder: Path | None = None
    try:
        try:
            for parent in reversed([p for p in output.absolute().parents if not p.exists()]):
                parent.mkdir()
                made.append(parent)
            folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.absolute().parent))
            free = shutil.disk_usage(folder).free
            if free < size:
                raise OutputError(
                    f"{output.absolute().parent} has {free >> 20} MiB free, this may take "
                    f"{size >> 20} MiB: free some, or give another --output"
                )
            folder.chmod(0o755)
            yield folder
            _publish(folder, output)
            made = []
        except OSError as error:
            raise _output_error(output, error) from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        for parent in reversed(made):
            parent.rmdir()


def _publish(folder: Path, output: Path) -> None:
    """Rename into place; an older bundle is moved aside first, and back if that fails."""
    if not output.exists():
        folder.rename(output)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{output.name}.old.", dir=output.absolute().parent))
    output.rename(aside / "bundle")
    try:
        folder.rename(output)
    except BaseException:
        (aside / "bundle").rename(output)
        aside.rmdir()
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _output_error(output: Path, error: OSError) -> OutputError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutputError(f"{output} cannot be written, the disk is full: free some, or give another --output")
    return OutputError(f"{output} cannot be written ({error.strerror or error}): give another --output")
