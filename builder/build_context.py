"""The state that all stages of a build share: configuration, checkpoints, output folder and progress callbacks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .codegen.tensorrt import capacity_of
from .config.build_config import BuildConfig
from .config.progress import Progress as Detail
from .prepare import Sources

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Stages:
    """Announces each stage of a build and records how long it took.

    Attributes:
        progress: Called with a stage's name when it begins.
        detail: Called within a stage, with the name of a phase and the share of it that is done.
        seconds: Duration of each finished stage, by name.
        began: When the build began, by `time.perf_counter`.
    """

    progress: Progress
    detail: Detail
    seconds: dict[str, float] = field(default_factory=dict)
    began: float = field(default_factory=time.perf_counter)

    def whole(self) -> dict[str, float]:
        """Return the seconds of each finished stage and of the rest, "between", which add up to the elapsed time."""
        between = time.perf_counter() - self.began - sum(self.seconds.values())
        return self.seconds | {"between": round(between, 3)}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Announce a stage and record its duration when it ends."""
        self.progress(name)
        started = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - started, 3)


@dataclass(frozen=True, slots=True)
class BuildContext:
    """A running build, which writes its files to `folder`."""

    config: BuildConfig
    folder: Path
    source: Sources
    stages: Stages

    @property
    def capacity(self) -> int:
        """Cache rows per slot; see `capacity_of`."""
        return capacity_of(self.config, self.source.max_seq_len)

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Announce a stage and record its duration when it ends."""
        return self.stages.timed(name)
