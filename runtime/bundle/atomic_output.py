"""Atomic output: files and folders are written beside their place, and renamed into it when they are complete."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from specbuild.runtime.errors import OutputError

from .manifest import MANIFEST
from .output_lock import ASIDE, NEW, OLD, beside, only_writer

_NO_REPLACE = 1  # RENAME_NOREPLACE of Linux's renameat2
_HERE = -100  # AT_FDCWD


def check_output(output: Path, force: bool, mark: str = MANIFEST, kind: str = "bundle") -> None:
    """Check, before a long build starts, whether a folder may be written to `output`.

    Args:
        output: The place of the folder.
        force: Whether a folder of the same kind, or an empty one, may be replaced.
        mark: The name of a file that every folder of this kind has.
        kind: What to call such a folder in errors.

    Raises:
        OutputError: If something at `output` must not be replaced, or `output` cannot be looked at.
    """
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


def write(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a whole file or none of it, by renaming a finished one made with `mode` into place. Raises OutputError.

    Its bytes are on the disk before it has its name: after a power failure the file is the new one or the old one.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.touch(mode)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise OutputError(f"{path} cannot be written ({error.strerror or error}): give another place") from error
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def staging(output: Path, size: int, check: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """Yield a hidden folder beside the output, which is renamed to it at the end, or removed on any error.

    Args:
        output: The place of the folder; a second writer of it is refused.
        size: How many bytes may be written.
        check: Raises if the output may not go there; called at the beginning and again at the end.

    Raises:
        OutputError: If another process writes the output, the disk is too full, or writing fails.
    """
    made: list[Path] = []
    try:
        try:
            for parent in reversed([p for p in output.absolute().parents if not p.exists()]):
                parent.mkdir()
                made.append(parent)
            with only_writer(output):
                check()
                folder = Path(tempfile.mkdtemp(prefix=beside(output, f"{NEW}-"), dir=output.absolute().parent))
                try:
                    free = shutil.disk_usage(folder).free
                    if free < size:
                        raise OutputError(
                            f"{output.absolute().parent} has {free >> 20} MiB free, this may take "
                            f"{size >> 20} MiB: free some, or give another --output"
                        )
                    folder.chmod(0o755)
                    yield folder
                    check()
                    _publish(folder, output)
                finally:  # also what lies beside it under its name, such as a runtime cache
                    for left in [path for path in folder.parent.iterdir() if path.name.startswith(folder.name)]:
                        shutil.rmtree(left, ignore_errors=True)
            made = []
        except OSError as error:
            raise _output_error(output, error) from error
    finally:
        for parent in reversed(made):
            with suppress(OSError):  # another process has put something there
                parent.rmdir()


def _publish(folder: Path, output: Path) -> None:
    """Rename a folder into place; an older output is moved aside first, and back if the rename fails."""
    if not output.exists():
        return _rename(folder, output)
    aside = Path(tempfile.mkdtemp(prefix=beside(output, f"{OLD}-"), dir=output.absolute().parent))
    output.rename(aside / ASIDE)
    try:
        _rename(folder, output)
    except BaseException:
        (aside / ASIDE).rename(output)
        aside.rmdir()
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _rename(folder: Path, output: Path) -> None:
    """Rename to a name that does not exist, not even as an empty folder made a moment ago; raise OSError if it does."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename and rename(_HERE, os.fsencode(folder), _HERE, os.fsencode(output), _NO_REPLACE) == 0:
        return
    number = ctypes.get_errno() if rename else errno.ENOSYS
    if number not in (errno.ENOSYS, errno.EINVAL):  # these: a kernel or a file system without it
        raise OSError(number, os.strerror(number), str(output))
    folder.rename(output)


def _output_error(output: Path, error: OSError) -> OutputError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutputError(f"{output} cannot be written, the disk is full: free some, or give another --output")
    return OutputError(f"{output} cannot be written ({error.strerror or error}): give another --output")
