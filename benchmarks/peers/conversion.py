"""A checkpoint as a peer wants it, converted once."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path


def converted(source: Path, folder: Path, command: Callable[[Path], list[str]]) -> Path:
    """`source` as `command(OUT)` converts it into OUT; the folder of an earlier run where source and command are its.

    Raises RuntimeError where the command fails.
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
