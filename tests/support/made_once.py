"""What several processes need, made by the first of them."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path


def made_once(root: Path, name: str, make: Callable[[Path], object]) -> Path:
    """What `make(path)` writes at `root / name`, unless another process has made it; others wait for it meanwhile."""
    path, made = root / name, root / f"{name}.made"
    with (root / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(path, ignore_errors=True)  # what a process left that was interrupted
            make(path)
            made.touch()
    return path
