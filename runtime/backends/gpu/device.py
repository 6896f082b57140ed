"""The seam between what decodes on a device and the device: memory, streams and graphs, kernels, compiled models.

Nothing here knows CUDA. `cuda.py` is a GPU; the tests have a device that is this process's own memory, on which the
same loops run with the kernels compiled for a CPU.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from specbuild.runtime.backends.executor import ModelSpec

from .pages import Pages

Step = Callable[[], None]
Place = tuple[int, int]  # a cache's slot, and a row in it
MAX_NODES = 64  # of a tree, and of a draft's levels together, in plugins/kernels.h
_ALIGNED = 64  # int32 numbers in 256 bytes, of which TensorRT wants an address to be a multiple


@dataclass(frozen=True, slots=True)
class Tensor:
    """Memory of a device: where it is, and what it holds; bfloat16 is held as uint16."""

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Device(Protocol):
    """Memory and streams. A stream is the driver's, by number; nothing enqueued has run when a call returns."""

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> Tensor:
        """Memory of the device, zero; freed by `close`. Raises ExecutionError where there is too little."""
        ...

    def pinned(self, shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
        """Memory of the host that the device copies from and to without waiting, zero; freed by `close`."""
        ...

    def stream(self) -> int:
        """A new stream."""
        ...

    def upload(self, to: Tensor, source: NDArray[Any], stream: int) -> None:
        """Enqueue a copy of `source`, pinned and left alone until it has run, to the beginning of `to`."""
        ...

    def download(self, to: NDArray[Any], source: Tensor, stream: int) -> None:
        """Enqueue a copy of the beginning of `source` to `to`, which is pinned and contiguous."""
        ...

    def fill(self, to: Tensor, byte: int, stream: int) -> None:
        """Enqueue writing one byte all over a tensor."""
        ...

    def copy(self, to: Tensor, source: Tensor, stream: int) -> None:
        """Enqueue a copy of all of `source` to the beginning of `to`."""
        ...

    def copy_rows(self, to: Tensor, source: Tensor, stream: int) -> None:
        """Enqueue copies of the rows of `source` to the beginnings of the rows of `to`, which are as long or longer."""
        ...

    def move_rows(self, cache: Tensor, source: Place, to: Place, count: int, stream: int) -> None:
        """Enqueue the copy of `count` rows of all layers and heads; cache `[2·layers, slots, heads, rows, D]`.

        The rows must be others than those they are copied to.
        """
        ...

    def after(self, stream: int, other: int) -> None:
        """What is enqueued on `stream` from now on waits for what is enqueued on `other` by now."""
        ...

    def wait(self, stream: int) -> None:
        """Block until everything enqueued on a stream has run; raises ExecutionError where some of it failed."""
        ...

    def graph(self, enqueue: Step, stream: int) -> Step:
        """What `enqueue` enqueues on a stream as one graph, captured now and not run; the result enqueues it.

        Where it cannot be captured the result is `enqueue` itself, and `uncaptured` says why.
        """
        ...

    def loop(self, body: Callable[[int], None], stream: int) -> Step | None:
        """As `graph`, what `body` enqueues as a loop's body: it runs once, and again until its condition is 0.

        `body` is given the condition's handle, as `specbuild_ring` takes it; it is 1 whenever the loop begins.
        None where it cannot be captured, and `uncaptured` says why.
        """
        ...

    def reached(self, counter: NDArray[np.uint64], value: int, stream: int) -> bool:
        """Block until a pinned `counter[0]`, which work on a stream raises, is at least `value`.

        False where all of the stream has run without that; raises ExecutionError where some of it failed.
        """
        ...

    uncaptured: list[str]  # why graphs could not be captured, one line each
    identity: dict[str, Any]  # what times are true of: a processor, and what computes on it

    def close(self) -> None:
        """Wait for everything, and free it all; raises the first error, once it is done."""
        ...


class Kernels(Protocol):
    """The kernels of plugins/kernels.h: `KernelLibrary`, or `CubinKernels` from a bundle."""

    def launch(self, name: str, params: ctypes.Structure, stream: int = 0) -> None:
        """Enqueue a kernel; raises OptionError for what it refuses."""
        ...

    def workspace(self, params: Any) -> int:
        """Bytes of workspace that TreeAttention or a choice needs."""
        ...


@dataclass(frozen=True, slots=True)
class TreeInputs:
    """What TreeAttention takes in place of masks: node i's row is `cache_len + tree_offset + i`."""

    parents: Tensor  # int32 [B, M], of the whole tree; steps of `prefill` longer than a bucket are chains
    cache_len: Tensor  # int32 [B]
    tree_offset: Tensor  # int32 [B]: nodes that are in the cache already
    counts: Tensor  # int32 [B]: how many of the N are nodes; what is padding is not written


class PageTable:
    """What `pages` says, on a device: for steps of all slots `tensor int32[B, T]`, for those of one each row alone."""

    def __init__(self, device: Device, pages: Pages) -> None:
        slots, width = pages.table.shape
        self.pages, self._device, self._version = pages, device, 0
        self.tensor, self._staged = device.empty((slots, width), np.int32), device.pinned((slots, width), np.int32)
        self._rows = device.empty((slots, -(-width // _ALIGNED) * _ALIGNED), np.int32)

    @property
    def stale(self) -> bool:
        """Whether the device has an older table."""
        return self._version != self.pages.version

    def update(self, stream: int) -> None:
        """Copy the table to the device, and wait until it is there; what else runs must not read it."""
        self._version = self.pages.version  # which may go up, and the table change, while it is copied
        self._staged[:] = self.pages.table
        self._device.upload(self.tensor, self._staged, stream)
        self._device.copy_rows(self._rows, self.tensor, stream)
        self._device.wait(stream)

    def row(self, slot: int) -> int:
        """The address of a slot's row, a multiple of 256."""
        return self._rows.address + slot * self._rows.nbytes // self._rows.shape[0]


class Model(Protocol):
    """A compiled graph over B slots, every tensor bound once.

    A step of N nodes reads and writes the beginning of each tensor, as if its shape had N in place of the most nodes.
    """

    spec: ModelSpec
    batch_size: int  # B
    buckets: Sequence[int]  # node counts that a step may have, ascending
    chunk: int  # most nodes of `prefill`, at least the largest bucket
    tokens: Tensor  # int32 [B, N]
    positions: Tensor  # int32 [B, N]; where there is a `tree`, positions and rows are not read, and there are no masks
    rows: Tensor  # int32 [B]: the cache row of each sequence's first node
    masks: dict[int, Tensor]  # bool [B, 1, N, S], by window: which cache rows a node sees; padding must see some
    logits: Tensor  # float32 [B, N, V]
    hidden: Tensor | None  # float32 [B, N, H]: hidden states that the model writes, for a head
    hidden_in: Tensor | None  # float32 [B, N, H]: those that a head reads
    cache: Tensor  # [2·layers, B, kv_heads, S, D]; keys of layer i at 2i, values at 2i + 1. Paged: X for B, rows for S

    @property
    def capturable(self) -> bool:
        """Whether a graph may hold its steps."""
        ...

    @property
    def lengths(self) -> Sequence[int]:
        """Node counts that `prefill` may have, ascending."""
        ...

    @property
    def pages(self) -> PageTable | None:
        """Where its cache is paged, X pages of so many rows: who has which."""
        ...

    @property
    def tree(self) -> TreeInputs | None:
        """Where its attention is TreeAttention: the inputs that it takes; None: standard operators."""
        ...

    def enqueue(self, nodes: int, stream: int) -> None:
        """A step of all slots, `nodes` one of `buckets`; all nodes' logits."""
        ...

    def prefill(self, slot: int, nodes: int, last: int, stream: int) -> None:
        """A step of one slot, `nodes` one of `lengths`; tensors as for B = 1, `logits[0, 0]` those of node `last`."""
        ...

    def close(self) -> None:
        """Free what is not the device's memory."""
        ...


def slot_parts(cache: Tensor, slot: int = 0) -> list[Tensor]:
    """Keys and values of each layer in one slot, in the cache's order; `cache [2·layers, slots, heads, rows, D]`."""
    layers, slots, *shape = cache.shape
    size = cache.nbytes // (layers * slots)
    starts = (cache.address + (layer * slots + slot) * size for layer in range(layers))
    return [Tensor(start, (1, *shape), cache.dtype) for start in starts]


def with_room(device: Device, shape: tuple[int, ...], dtype: DTypeLike, nodes: int, chunk: int) -> Tensor:
    """A tensor of `shape`, `nodes` of each sequence, whose memory suffices for a chunk of one slot as well."""
    lines = -(-max(shape[0] * nodes, chunk) // nodes)
    memory = device.empty((lines, *shape[1:]), dtype)
    return Tensor(memory.address, shape, memory.dtype)


def hidden_states(
    device: Device, spec: ModelSpec, batch_size: int, nodes: int, chunk: int
) -> tuple[Tensor | None, Tensor | None]:
    """`Model.hidden` and `Model.hidden_in`, as a model has them."""
    shape = batch_size, nodes, spec.hidden
    made = with_room(device, shape, np.float32, nodes, chunk) if spec.hidden else None
    return made, with_room(device, shape, np.float32, nodes, chunk) if spec.reads_hidden else None
