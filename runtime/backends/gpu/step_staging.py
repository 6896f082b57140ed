"""Staging of a step's inputs: page-locked arrays, written by the host and uploaded."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.backends.executor import StepInput
from specbuild.runtime.backends.slot_rows import SlotRows

from .device import Device
from .model import Model
from .step_tensors import TreeInputs


class StepStaging:
    """The host's copies of a model's inputs, allocated once for its largest step."""

    def __init__(self, device: Device, model: Model, rows: SlotRows) -> None:
        """`rows`: what the slots hold."""
        self._device, self._model, self._spec, self._rows = device, model, model.spec, rows
        tensors, batch = model.tensors, model.batch_size
        nodes = max(batch * model.buckets[-1], model.chunk)
        self._tokens, self._positions = device.pinned((nodes,), np.int32), device.pinned((nodes,), np.int32)
        self._write_rows = device.pinned((batch,), np.int32)
        self._lengths = device.pinned((3, batch), np.int32)  # TreeAttention's cache_len, counts, tree_offset
        self._parents = device.pinned(tensors.tree.parents.shape if tensors.tree else (0,), np.int32)
        self._hidden = device.pinned((nodes, self._spec.hidden), np.float32) if tensors.hidden_in else None
        self._masks = {window: device.pinned((nodes * self._spec.capacity,), np.bool_) for window in tensors.masks}

    def upload(self, inputs: dict[int, StepInput], batch: int, nodes: int, stream: int) -> None:
        """Enqueue the uploads of a step's inputs `[batch, nodes]`; the keys of `inputs` are indices in the batch."""
        tensors = self._model.tensors
        parts = [(tensors.tokens, _part(self._tokens, batch, nodes), "tokens")]
        if self._hidden is not None and tensors.hidden_in:
            hidden = _part(self._hidden.reshape(-1), batch, nodes, self._spec.hidden)
            parts.append((tensors.hidden_in, hidden, "hidden"))
        for to, staged, name in parts:
            staged.fill(0)
            for at, step_input in inputs.items():
                staged[at, : len(step_input.tokens)] = getattr(step_input, name)
            self._device.upload(to, staged, stream)
        if tensors.tree:
            self._upload_trees(tensors.tree, inputs, batch, stream)
        else:
            self._upload_masks(inputs, batch, nodes, stream)

    def _upload_trees(self, tree: TreeInputs, inputs: dict[int, StepInput], batch: int, stream: int) -> None:
        """Upload the trees of a step; a slot without an input has no nodes, and nothing is written to it."""
        self._lengths.fill(0)
        for at, step_input in inputs.items():
            count, before = len(step_input.tokens), step_input.start - step_input.committed
            self._lengths[:, at] = step_input.committed, count, before
            if before + count <= tree.parents.shape[1]:  # a longer one is a prefill chain, whose step reads no parents
                self._parents[at, before : before + count] = _parents(step_input)
        for to, source in zip((tree.cache_len, tree.counts, tree.tree_offset), self._lengths, strict=True):
            self._device.upload(to, source[:batch], stream)
        self._device.upload(tree.parents, self._parents[:batch], stream)

    def _upload_masks(self, inputs: dict[int, StepInput], batch: int, nodes: int, stream: int) -> None:
        """Upload the masks of a step, with the positions and first rows."""
        shape = batch, nodes, self._spec.capacity
        positions = _part(self._positions, batch, nodes)
        masks = {window: _part(array, *shape) for window, array in self._masks.items()}
        for array in (positions, *masks.values()):
            array.fill(0)
        for slot in range(batch):
            self._write_rows[slot] = min(self._rows.ends[slot], self._spec.capacity - nodes)
            for mask in masks.values():
                mask[slot, :, 0] = True  # padding sees row 0
        for at, step_input in inputs.items():
            count = len(step_input.tokens)
            self._write_rows[at] = step_input.start
            positions[at, :count] = np.minimum(step_input.positions, self._spec.max_positions - 1)
            for window, mask in masks.items():
                self._fill_mask(step_input, window, mask[at, :count])
        self._device.upload(self._model.tensors.positions, positions, stream)
        self._device.upload(self._model.tensors.rows, self._write_rows[:batch], stream)
        for window, mask in masks.items():
            self._device.upload(self._model.tensors.masks[window], mask, stream)

    def _fill_mask(self, step_input: StepInput, window: int, mask: NDArray[np.bool_]) -> None:
        """Set which cache rows an input's nodes see, in `mask bool[n, S]`."""
        count, end = mask.shape[0], step_input.start + mask.shape[0]
        mask[:, : step_input.committed] = True
        chain = np.tri(count, end - step_input.committed, step_input.start - step_input.committed, np.bool_)
        mask[:, step_input.committed : end] = chain if step_input.visible is None else step_input.visible
        mask[:, end:] = False
        if window:
            distance = np.asarray(step_input.positions)[:, None] - self._rows.positions[step_input.slot, :end]
            mask[:, :end] &= distance < window


def _parents(step_input: StepInput) -> NDArray[np.int64]:
    """Return each node's parent, as its index in the tree that begins at row `committed`; −1: a committed row."""
    count, before = len(step_input.tokens), step_input.start - step_input.committed
    if step_input.visible is None:
        return np.arange(before - 1, before + count - 1)
    above = step_input.visible & np.tri(count, before + count, before - 1, dtype=np.bool_)  # a node also sees itself
    return np.where(above.any(1), before + count - 1 - above[:, ::-1].argmax(1), -1)


def _part(array: NDArray[Any], *shape: int) -> NDArray[Any]:
    """Return the beginning of a flat array, reshaped."""
    return array[: int(np.prod(shape))].reshape(shape)
