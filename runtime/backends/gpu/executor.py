"""The GPU executor: it pads batches for a model with standard operators or TreeAttention, on any `Device`.

A step runs the smallest bucket that holds its largest input, for all slots; a slot without an input computes padding in
the rows after its last used one. A prefill chunk longer than any bucket is a step of its slot alone, padded to one of
the few lengths that the model has.

If the executor is kept to an exactness class, decode steps always have one shape: the class's nodes in every slot. A
prefill step's length depends only on the rows of its tokens, wherever the prefill began.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.backends.exactness import ExactnessClass
from specbuild.runtime.backends.executor import StepInput
from specbuild.runtime.backends.slot_rows import SlotRows
from specbuild.runtime.errors import ExecutionError

from .device import MAX_NODES, Device, Step, Tensor
from .model import Model
from .pieces import pieces
from .step_staging import StepStaging
from .step_tensors import slot_parts


class StandardExecutor:
    """See `Executor`. Pinned staging is allocated once; only that of logits grows, to the maximum rows ever wanted."""

    def __init__(self, device: Device, model: Model, stream: int) -> None:
        """Run `model` on `stream`; the caller closes `device`."""
        self.device, self.model, self.stream, self._timed = device, model, stream, False
        self.spec, self.batch_size, self.seconds = model.spec, model.batch_size, 0.0
        self._marks: tuple[Any, Any] = (None, None)  # of the last timed step; the device uses them again
        self.buckets = model.buckets
        self.exactness: ExactnessClass | None = None
        states = max(self.batch_size * model.buckets[-1], model.chunk), self.spec.hidden
        self._hidden_out = device.pinned(states, np.float32) if model.tensors.hidden else None
        self._rows = SlotRows(self.spec, self.batch_size)
        self._staging = StepStaging(device, model, self._rows)
        self._logits = device.pinned((self.batch_size, self.spec.vocab_size), np.float32)

    @property
    def identity(self) -> dict[str, Any]:
        """See `Executor.identity`."""
        return self.device.identity

    def keep_to(self, exactness: ExactnessClass | None) -> None:
        """Give all decode steps the class's one shape from now on; None: the smallest bucket that fits.

        Raises ExecutionError if no bucket holds the class's nodes.
        """
        self.exactness, self.buckets = None, self.model.buckets
        if exactness:
            self.exactness, self.buckets = exactness, (self.bucket(exactness.sequence_rows),)

    def bucket(self, nodes: int) -> int:
        """Return the smallest bucket of at least `nodes` nodes; raise ExecutionError if there is none."""
        for bucket in self.buckets:
            if bucket >= nodes:
                return bucket
        raise ExecutionError(f"{nodes} nodes do not fit a step of the {self.spec.name}")

    @property
    def max_rows(self) -> int:
        """Maximum number of nodes in all levels of a draft together."""
        return self.model.tensors.tree.parents.shape[1] if self.model.tensors.tree else MAX_NODES

    def step(self, inputs: Sequence[StepInput]) -> list[NDArray[np.float32]]:
        """Run one step; see `Executor.step`. An input longer than any bucket gets at most one row of logits."""
        for step_input in inputs:
            self._check(step_input)
        logits = np.split(self._reserve(sum(s.logits for s in inputs)), np.cumsum([s.logits for s in inputs]))
        short = [pair for pair in zip(inputs, logits, strict=False) if not self._prefills(pair[0])]
        for step_input, output in zip(inputs, logits, strict=False):
            if self._prefills(step_input):
                for piece, nodes in pieces(step_input, self.model, self.exactness is not None):
                    count = len(piece.tokens)
                    self._staging.upload({0: piece}, 1, nodes, self.stream)
                    self.timed(partial(self.model.prefill, piece.slot, nodes, count - 1, self.stream))
                    self._download(output[: piece.logits], self.model.tensors.logits, 0)
                    self.keep([(piece.slot, piece.start, range(count))])
        if short:
            nodes = self.bucket(max(len(step_input.tokens) for step_input, _ in short))
            inputs_by_slot = {step_input.slot: step_input for step_input, _ in short}
            self._staging.upload(inputs_by_slot, self.batch_size, nodes, self.stream)
            self.timed(partial(self.model.enqueue, nodes, self.stream))
            for step_input, output in short:
                first = step_input.slot * nodes + len(step_input.tokens) - step_input.logits
                self._download(output, self.model.tensors.logits, first)
            self.keep([(s.slot, s.start, range(s.slot * nodes, s.slot * nodes + len(s.tokens))) for s, _ in short])
        return logits[: len(inputs)]

    def _prefills(self, step_input: StepInput) -> bool:
        """Return whether an input is a prefill chunk, which is run in steps of its own."""
        return len(step_input.tokens) > self.buckets[-1] or (self.exactness is not None and step_input.logits < 2)

    def fetch(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """Return some rows of the last step's logits `[B · nodes, V]`, valid until the next step."""
        logits = self._reserve(len(rows))[: len(rows)]
        for at, row in enumerate(rows):
            self._download(logits[at : at + 1], self.model.tensors.logits, row)
        self.wait()
        return logits

    def keep(self, accepted: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Wait for the last step, and keep the hidden states of some of its nodes.

        Args:
            accepted: For each sequence: slot, first cache row to keep them for, node indices in `[B · nodes]`.
        """
        if self._hidden_out is None or self.model.tensors.hidden is None:
            return self.wait()
        for _, _, nodes in accepted:
            first = min(nodes)
            self._download(self._hidden_out[first : max(nodes) + 1], self.model.tensors.hidden, first)
        self.wait()
        for slot, first, nodes in accepted:
            self._rows.hidden[slot, first : first + len(nodes)] = self._hidden_out[list(nodes)]

    def repeatable(self, nodes: int) -> Step:
        """Return a function that enqueues a step of `nodes` nodes on the current inputs, as a graph if possible.

        The step must have run before.
        """
        step = partial(self.model.enqueue, nodes, self.stream)
        return self.device.graph(step, self.stream) if self.model.capturable else step

    def timed(self, enqueue: Step) -> None:
        """Call `enqueue`; the next `wait` counts the device's seconds from what it enqueued first to the last."""
        begin = self.device.mark(self.stream, self._marks[0])
        enqueue()
        self._marks, self._timed = (begin, self.device.mark(self.stream, self._marks[1])), True

    def wait(self) -> None:
        """Block until everything enqueued on the stream has run; raise ExecutionError if some of it failed."""
        self.device.wait(self.stream)
        if self._timed:
            begin, end = self._marks
            self.seconds, self._timed = self.seconds + (end - begin) / 1000, False

    def _check(self, step_input: StepInput) -> None:
        """Record an input's rows; raise ExecutionError if it does not fit the model."""
        self._rows.write(step_input, self.model.chunk if step_input.logits < 2 else self.buckets[-1])
        beyond = step_input.start + len(step_input.tokens) - step_input.committed
        if self.model.tensors.tree and beyond > self.max_rows and step_input.logits > 1:
            raise ExecutionError(f"the tree has more than {self.max_rows} nodes: ask for a smaller one")

    def _reserve(self, rows: int) -> NDArray[np.float32]:
        if rows > len(self._logits):
            self._logits = self.device.pinned((rows, self.spec.vocab_size), np.float32)
        return self._logits

    def _download(self, to: NDArray[np.float32], source: Tensor, row: int) -> None:
        """Enqueue the copy of rows of `source`, seen as `[batch · nodes, …]`, from `row` on."""
        if len(to):
            rows = Tensor(source.address + row * to.strides[0], to.shape, to.dtype)
            self.device.download(to, rows, self.stream)

    def rows(self, slot: int) -> int:
        """Return the number of cache rows that a slot has at the moment."""
        pages = self.model.pages
        return pages.slot_rows(slot) if pages else self.spec.capacity

    def commit(self, slot: int, rows: Sequence[int], start: int) -> None:
        """Move cache rows; see `Executor.commit`. Without rows, only record where the slot's rows end."""
        for to, row in enumerate(rows, start):
            if row != to:
                self.device.move_rows(self.model.tensors.cache, (slot, row), (slot, to), 1, self.stream)
        self._rows.commit(slot, rows, start)

    def copy(self, slot: int, source: int, rows: int) -> None:
        """Copy cache rows; see `Executor.copy`. Slots of paged caches share pages, so only hidden states are copied."""
        self._rows.copy(slot, source, rows)
        if self.model.pages is None:
            self.device.move_rows(self.model.tensors.cache, (source, 0), (slot, 0), rows, self.stream)
            self.wait()

    def hidden(self, slot: int) -> NDArray[np.float32]:
        """See `Executor.hidden`."""
        rows: NDArray[np.float32] = self._rows.hidden[slot]
        return rows

    def erase(self, slot: int) -> None:
        """Zero a slot's cache, or a page: a NaN row would spoil even nodes that do not see it, as 0 · NaN is NaN."""
        for part in slot_parts(self.model.tensors.cache, slot):
            self.device.fill(part, 0, self.stream)
        self.wait()

    @property
    def cache_bytes(self) -> int:
        """Size of the cache in bytes."""
        return self.model.tensors.cache.nbytes

    def close(self) -> None:
        """Free the model; its memory is the device's."""
        self.model.close()
