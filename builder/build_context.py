"""What every stage of a build is told: what was asked for, what it is made from, where it goes, and whom to tell."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .codegen.tensorrt import capacity_of
from .config.build_config import BuildConfig
from .prepare import Sources

Progress = Callable[[str], None]
Detail = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Stages:
    """Tells `progress` of each stage as it begins, and notes how long it took; `detail` is told what goes on in it."""

    progress: Progress
    detail: Detail
    seconds: dict[str, float] = field(default_factory=dict)
    began: float = field(default_factory=time.perf_counter)

    def whole(self) -> dict[str, float]:
        """Seconds by stage until now, and "between" them, which add up to all that the build took."""
        between = time.perf_counter() - self.began - sum(self.seconds.values())
        return self.seconds | {"between": round(between, 3)}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Announce a stage, and note how long it took."""
        self.progress(name)
        started = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - started, 3)


@dataclass(frozen=True, slots=True)
class BuildContext:
    """One build under way, which writes to `folder`."""

    config: BuildConfig
    folder: Path
    source: Sources
    stages: Stages

    @property
    def capacity(self) -> int:
        """Cache rows of a slot; see `capacity_of`."""
        return capacity_of(self.config, self.source.max_seq_len)

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Announce a stage, and note how long it took."""
        return self.stages.timed(name)
