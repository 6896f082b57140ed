"""Graphs of prefill steps, by slot and nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from specbuild.runtime.backends.gpu.device import Device, Step

RUNS = 2  # runs until a step is steady: it allocates and chooses kernels
_MAX_GRAPHS = 64


class PrefillGraphs:
    """Graphs of one slot's steps. A graph reads the node with logits from memory, `last int32[1]`."""

    def __init__(self, device: Device) -> None:
        self._device, self.last = device, device.empty((1,), np.int32)
        self._graphs, self._runs = dict[tuple[int, int], Step](), Counter[int]()

    def step(self, slot: int, nodes: int, bind: Callable[[], Step], stream: int) -> Step:
        """Return a step, as a graph if steps of its length have run before and there are not too many.

        `bind` returns what enqueues the step.
        """
        if graph := self._graphs.get((slot, nodes)):
            return graph
        step = bind()
        self._runs[nodes] += 1
        if self._runs[nodes] > RUNS and len(self._graphs) < _MAX_GRAPHS:
            step = self._graphs[slot, nodes] = self._device.graph(step, stream)
        return step

    def clear(self) -> None:
        """Drop all graphs."""
        self._graphs.clear()
