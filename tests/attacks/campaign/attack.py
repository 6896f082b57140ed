"""What a class of attack is, and what all of them work with."""

from __future__ import annotations

import fcntl
import functools
from dataclasses import dataclass
from pathlib import Path

from .golden import Golden


@dataclass(frozen=True)
class Bench:
    """`bundle`: a sound bundle, never changed; `home`: a folder that all workers share."""

    bundle: Path
    home: Path

    @functools.cached_property
    def golden(self):
        """The tokens of plain decoding."""
        return Golden.of(self.bundle)

    def once(self, name, make):
        """What `make(path)` writes, made by the first worker that asks for it."""
        path, made = self.home / name, self.home / f"{name}.made"
        with (self.home / f"{name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not made.exists():
                make(path)
                made.touch()
        return path


class Attack:
    """Prepared once in a worker; then `attempt` is called for one case after another."""

    def __init__(self, bench):
        self.bench = bench

    def attempt(self, rng, place):
        """One case, made of `rng` alone; what it is made of goes into the empty folder `place`.

        Returns where all was as promised. Raises SpecbuildError where the input was refused, which is as promised too,
        and Fault where the case itself sees what is wrong. Whatever else it raises is a finding.
        """
        raise NotImplementedError

    def close(self):
        """Free what was prepared."""
