"""Graphs of what rounds enqueue, each captured once."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from specbuild.runtime.backends import nvtx
from specbuild.runtime.backends.gpu.device import Step
from specbuild.runtime.backends.gpu.executor import StandardExecutor

MAX_GRAPHS = 64
UNCAPTURABLE = "the models' steps may not be captured, by their own word"


class Graphs:
    """Graphs by key. A key's first use has none: it may load a kernel or allocate, which no capture allows."""

    def __init__(self, executor: StandardExecutor) -> None:
        """`executor`: what runs the steps in the graphs, on its stream."""
        self._executor, self._graphs = executor, dict[Hashable, Step | None]()
        uncaptured = executor.device.uncaptured
        if not executor.model.capturable and UNCAPTURABLE not in uncaptured:
            uncaptured.append(UNCAPTURABLE)

    def find(self, key: Hashable, capture: Callable[[], Step | None]) -> Step | None:
        """Return the key's graph; None at its first use, without captures, or under a profiler."""
        if not self._executor.model.capturable or nvtx.enabled:
            return None
        if key in self._graphs:
            self._graphs[key] = self._graphs[key] or capture()
        else:
            if len(self._graphs) >= MAX_GRAPHS:
                self._graphs.clear()
            self._graphs[key] = None
        return self._graphs[key]

    def run(self, key: Hashable, enqueue: Step) -> None:
        """Enqueue the key's graph, or what it would hold, timed."""
        executor = self._executor
        executor.timed(self.find(key, lambda: executor.device.graph(enqueue, executor.stream)) or enqueue)

    def clear(self) -> None:
        """Drop all graphs."""
        self._graphs.clear()
