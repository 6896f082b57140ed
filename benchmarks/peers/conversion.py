"""Conversion of a checkpoint for a peer, once."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path


def converted(source: Path, folder: Path, command: Callable[[Path], list[str]]) -> Path:
    """Return the folder with `source` as converted by the command line `command(OUT)`.

    The folder of an earlier run is reused if source and command are the same.

    Args:
        source: The checkpoint's folder.
        folder: Where converted checkpoints are kept.
        command: Returns the command line that converts `source` into a given folder.

    Raises:
        RuntimeError: The command failed.
    """
    digest = hashlib.sha256(" ".join(command(Path("out"))).encode())
    for path in sorted(source.iterdir()):
        digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    out = folder / f"{source.name}-{digest.hexdigest()[:16]}"
    if not out.is_dir():
        temporary = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder))
        try:
            words = command(temporary / "out")
            if status := subprocess.run(words, stdin=subprocess.DEVNULL, stdout=sys.stderr).returncode:
                raise RuntimeError(f"{source} could not be converted: {words[0]} ended with status {status}")
            (temporary / "out").rename(out)
        finally:
            shutil.rmtree(temporary)
    return out
