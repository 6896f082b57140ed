"""An executor's per-slot records of its cache rows, besides their keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specbuild.runtime.errors import ExecutionError

from .executor import ModelSpec, StepInput


class SlotRows:
    """For each slot: where its used rows end, the rows' positions (for windows), and their hidden states.

    `ends[slot]`: the row after the last used one. `positions[B, S]`: a committed row's position is its row number.
    `hidden float32[B, S, H]`.
    """

    def __init__(self, spec: ModelSpec, batch_size: int) -> None:
        self.spec, self.ends = spec, [0] * batch_size
        self.positions = np.tile(np.arange(spec.capacity, dtype=np.int32), (batch_size, 1))
        self.hidden = np.zeros((batch_size, spec.capacity, spec.hidden), dtype=np.float32)
        self._windowed = any(spec.windows)

    def write(self, step_input: StepInput, max_nodes: int) -> None:
        """Record the rows that a step is about to write; raise ExecutionError if they do not fit."""
        slot, start, count = step_input.slot, step_input.start, len(step_input.tokens)
        if start + count > self.spec.capacity or count > max_nodes:
            raise ExecutionError(f"{count} nodes from row {start} on do not fit the {self.spec.name}")
        self.ends[slot] = start + count
        if self._windowed:
            self.positions[slot, start : start + count] = step_input.positions

    def commit(self, slot: int, rows: Sequence[int], start: int) -> None:
        """See `Executor.commit`."""
        if self.spec.hidden and rows:
            self.hidden[slot, start : start + len(rows)] = self.hidden[slot, list(rows)]
        if self._windowed:
            end = max(self.ends[slot], start + len(rows))
            self.positions[slot, start:end] = np.arange(start, end)
        self.ends[slot] = start + len(rows)

    def copy(self, slot: int, source: int, rows: int) -> None:
        """See `Executor.copy`."""
        self.hidden[slot, :rows] = self.hidden[source, :rows]
