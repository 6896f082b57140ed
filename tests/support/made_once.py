"""What several processes need, made by the first of them."""

import fcntl
import shutil


def made_once(root, name, make):
    """What `make(path)` writes at `root / name`, unless another process has made it; others wait for it meanwhile."""
    path, made = root / name, root / f"{name}.made"
    with (root / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(path, ignore_errors=True)  # what a process left that was interrupted
            make(path)
            made.touch()
    return path
