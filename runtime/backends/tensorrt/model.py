"""A TensorRT or TensorRT-RTX plan as a `Model`: an execution context per bucket, with every tensor bound once.

Prefill has contexts of its own, whose cache is one slot's part. A context is made when it is first needed. All share
one scratch memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specbuild.runtime.backends.executor import ModelSpec
from specbuild.runtime.backends.gpu.cuda import Cuda
from specbuild.runtime.backends.gpu.device import Tensor
from specbuild.runtime.backends.gpu.step_tensors import StepTensors
from specbuild.runtime.backends.gpu.tensors import CACHES, check_tensors
from specbuild.runtime.errors import BundleError, ExecutionError

from .pages import PageTable
from .plan import Plan, check_profiles

PROMPT = "prompt"  # the profile of steps longer than any bucket
_ALIGNMENT = 256  # bytes; TensorRT requires every address to be a multiple


class TrtModel:
    """See `Model`. Tensors have the largest bucket's shapes; those of nodes also have room for a chunk of one slot.

    Its steps must not overlap, neither with each other nor with steps of models that share its scratch memory.
    """

    def __init__(
        self,
        plan: Plan,
        spec: ModelSpec,
        device: Cuda,
        batch_size: int,
        scratch: Tensor | None = None,
        pages: PageTable | None = None,
    ) -> None:
        """Allocate the tensors, and run the largest step once.

        Raises BundleError for a plan that is not as the manifest says, ExecutionError for too little memory of the GPU.

        Args:
            plan: The plan, which `close` closes.
            spec: The model.
            device: The GPU.
            batch_size: The number of slots.
            scratch: At least `plan.scratch_bytes` bytes of scratch memory; None: allocate it.
            pages: The page table of paged caches, shared by all models; None: linear caches.
        """
        self.spec, self.batch_size, self._plan, self._device = spec, batch_size, plan, device
        record = plan.record
        caches = record.attention, record.kv_cache_dtype, record.block_size
        dtype = np.dtype(CACHES[check_tensors(spec, plan.tensors, *caches)])
        check_profiles(record, plan.profiles)
        cache, self.pages = _cache(spec, record.block_size, batch_size, dtype, device, pages), pages
        nodes = {name: sizes["nodes"][2] for name, sizes in record.profiles.items()}
        self._exact = {max_nodes: at for at, (name, max_nodes) in enumerate(nodes.items()) if name != PROMPT}
        self._ranges = {max_nodes: at for at, (name, max_nodes) in enumerate(nodes.items()) if name == PROMPT}
        self.buckets: Sequence[int] = tuple(sorted(self._exact))
        self.chunk, largest = min(max([*self.buckets, *self._ranges]), spec.capacity), self.buckets[-1]
        quarters = (-(-self.chunk * part // 4) for part in range(1, 5))
        self.lengths: Sequence[int] = (largest, *(nodes for nodes in quarters if nodes > largest))
        trees = [sizes["tree"][2] for sizes in record.profiles.values() if "tree" in sizes and sizes["tree"][2]]
        sizes = batch_size, largest, self.chunk
        self.tensors = StepTensors.allocate(device, spec, sizes, cache, min(trees, default=0))
        self._scratch = scratch or device.empty((plan.scratch_bytes,), np.uint8)
        if self._scratch.nbytes < plan.scratch_bytes:
            size = self._scratch.nbytes
            raise ExecutionError(f"the {spec.name} needs {plan.scratch_bytes} bytes of scratch, not {size}")
        self._stream = device.stream()
        self._numbers = self._number_rows(self._stream)
        self._steps, self._slots, self._ran = dict[int, Any](), dict[int, Any](), set[tuple[int, int]]()
        self.capturable = True
        self._try()

    def _number_rows(self, stream: int) -> Tensor:
        """Return `int32[chunk, ≥ buckets[-1]]`: row 0 is 0, 1, 2, …; row n begins with n. Every row is aligned."""
        step = _ALIGNMENT // 4
        table = self._device.pinned((self.chunk, -(-self.buckets[-1] // step) * step), np.int32)
        table[0], table[:, 0] = np.arange(table.shape[1]), np.arange(self.chunk)
        tensor = self._device.empty(table.shape, np.int32)
        self._device.upload(tensor, table, stream)
        return tensor

    def _try(self) -> None:
        """Run the largest step, so that what is wrong with the plan is found at once.

        All nodes see all rows, so that none gives NaN; with TreeAttention all nodes are padding, which gives 0.
        """
        for mask in self.tensors.masks.values():
            self._device.fill(mask, 1, self._stream)
        self.enqueue(self.buckets[-1], self._stream)
        for tensor in (*self.tensors.masks.values(), self.tensors.cache):
            self._device.fill(tensor, 0, self._stream)
        self._device.wait(self._stream)

    def _context(self, profile: int) -> Any:
        """Return a new context; while a graph is captured, which none may be made in, raise ExecutionError."""
        if self._device.capturing:
            raise ExecutionError(f"a step of the {self.spec.name} has not run yet: it cannot be captured")
        with self._device.current:
            return self._plan.context(profile, self._scratch, self._stream)

    def _run(self, context: Any, batch: int, nodes: int, stream: int) -> None:
        """Enqueue a context's step; keep what the first of a shape has compiled."""
        with self._device.current:
            self._plan.call(context.execute_async_v3, stream)
        if (batch, nodes) not in self._ran:
            self._ran.add((batch, nodes))
            self._plan.keep_compiled()

    def _bind(self, context: Any, batch: int, nodes: int, outputs: int, slot: int = 0, first: int = 0) -> None:
        """Set a context's shapes and addresses, with the cache from `slot` on.

        `first`: the row of `_numbers` that lists the nodes with logits.
        """
        tensors, numbers = self.tensors, self._numbers.view(outputs, offset=first * self._numbers.nbytes // self.chunk)
        inputs, results = tensors.ends(self.spec, batch, nodes, numbers)
        past, present = tensors.caches(*((0, tensors.cache.shape[1]) if self.pages else (slot, batch)))
        if tree := tensors.tree:
            vectors = {"cache_len": tree.cache_len, "tree_offset": tree.tree_offset, "counts": tree.counts}
            inputs |= {name: vector.view(batch) for name, vector in vectors.items()}
            inputs["parents"] = tree.parents.view(batch, tree.parents.shape[1] if nodes <= self.buckets[-1] else 0)
            if table := self.pages:
                address = table.tensor.address if batch == self.batch_size else table.line(slot)
                inputs["page_table"] = Tensor(address, (batch, table.tensor.shape[1]), table.tensor.dtype)
        else:
            inputs |= tensors.placed(batch, nodes)
        inputs |= past
        with self._device.current:
            for name, tensor in inputs.items():
                self._plan.call(context.set_input_shape, name, tensor.shape)
            for name, tensor in (inputs | results | present).items():
                self._plan.call(context.set_tensor_address, name, tensor.address)

    def enqueue(self, nodes: int, stream: int) -> None:
        """Enqueue a step of all slots; see `Model.enqueue`."""
        if nodes not in self._steps:
            self._steps[nodes] = context = self._context(self._exact[nodes])
            self._bind(context, self.batch_size, nodes, nodes)
            self.capturable = self.capturable and _capturable(context, stream)
        self._run(self._steps[nodes], self.batch_size, nodes, stream)

    def prefill(self, slot: int, nodes: int, last: int, stream: int) -> None:
        """Enqueue a step of one slot; see `Model.prefill`. It binds tensors, so no graph can hold it."""
        if nodes not in self.lengths:
            raise ExecutionError(f"a step of one slot has {', '.join(map(str, self.lengths))} nodes, not {nodes}")
        largest = self.buckets[-1]
        longest = largest if nodes == largest else max(self._ranges)
        if longest not in self._slots:
            self._slots[longest] = self._context(self._exact[largest] if nodes == largest else self._ranges[longest])
        self._bind(self._slots[longest], 1, nodes, nodes if nodes == largest else 1, slot, last)
        self._run(self._slots[longest], 1, nodes, stream)

    def close(self) -> None:
        """Free the contexts and the weights; see `Model.close`."""
        self._steps.clear()
        self._slots.clear()
        self._plan.close()


def _capturable(context: Any, stream: int) -> bool:
    """Return whether a graph may hold a context's steps, if the context can tell; else True."""
    return not hasattr(context, "is_stream_capturable") or bool(context.is_stream_capturable(stream))


def _cache(
    spec: ModelSpec, block_size: int, batch_size: int, dtype: np.dtype[Any], device: Cuda, pages: PageTable | None
) -> Tensor:
    """Allocate a model's cache, linear or in pages of `block_size` rows; raise BundleError if that is impossible."""
    if block_size != (pages.rows if pages else 0) or (pages and block_size * pages.table.shape[1] != spec.capacity):
        raise BundleError(f"the {spec.name}'s pages are not those of the other model: build the bundle again")
    parts, rows = (1 + pages.count, pages.rows) if pages else (batch_size, spec.capacity)
    size = spec.kv_heads * rows * spec.head_dim * dtype.itemsize
    if size % _ALIGNMENT:
        raise BundleError(
            f"the {spec.name}'s cache has {size} bytes a slot and layer, and TensorRT wants multiples of "
            f"{_ALIGNMENT}: build it for another length"
        )
    return device.empty((2 * spec.layers, parts, spec.kv_heads, rows, spec.head_dim), dtype)
