"""The interface between decoding and a device: memory, streams and graphs, kernels, compiled models.

Nothing here knows CUDA. `cuda.py` implements a GPU; the tests have a device in this process's own memory, on which the
same loops run with the kernels compiled for a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

Step = Callable[[], None]
Place = tuple[int, int]  # a slot of a cache, and a row in it
MAX_NODES = 64  # in a tree, and in all levels of a draft; as in plugins/kernels.h


@dataclass(frozen=True, slots=True)
class Tensor:
    """Device memory: its address, shape and dtype; bfloat16 is held as uint16."""

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, *shape: int, offset: int = 0) -> Tensor:
        """Return a part of it, in another shape, from a byte on."""
        return Tensor(self.address + offset, shape, self.dtype)


class Device(Protocol):
    """Memory and streams. A stream is the driver's handle; when a call returns, what it enqueued need not have run."""

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> Tensor:
        """Allocate zeroed device memory, freed by `close`; raise ExecutionError if there is too little."""
        ...

    def pinned(self, shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
        """Allocate zeroed page-locked host memory, for copies that do not block; freed by `close`."""
        ...

    def stream(self) -> int:
        """Create a stream."""
        ...

    def upload(self, to: Tensor, source: NDArray[Any], stream: int) -> None:
        """Enqueue a copy of `source` to the beginning of `to`; `source` is pinned, and unchanged until it has run."""
        ...

    def download(self, to: NDArray[Any], source: Tensor, stream: int) -> None:
        """Enqueue a copy of the beginning of `source` to `to`, which is pinned and contiguous."""
        ...

    def fill(self, to: Tensor, byte: int, stream: int) -> None:
        """Enqueue setting every byte of a tensor to `byte`."""
        ...

    def copy(self, to: Tensor, source: Tensor, stream: int) -> None:
        """Enqueue a copy of all of `source` to the beginning of `to`."""
        ...

    def copy_rows(self, to: Tensor, source: Tensor, stream: int) -> None:
        """Enqueue copies of the rows of `source` to the beginnings of the rows of `to`, which are as long or longer."""
        ...

    def move_rows(self, cache: Tensor, source: Place, to: Place, count: int, stream: int) -> None:
        """Enqueue a copy of `count` rows in all layers and heads of a cache `[2·layers, slots, heads, rows, D]`.

        The rows must not overlap those that they are copied to.
        """
        ...

    def after(self, stream: int, other: int) -> None:
        """Make what is enqueued on `stream` from now on wait for what has been enqueued on `other` so far."""
        ...

    def wait(self, stream: int) -> None:
        """Block until everything enqueued on a stream has run; raise ExecutionError if some of it failed."""
        ...

    def mark(self, stream: int, mark: Any = None) -> Any:
        """Enqueue noting the device's time, in a new mark or again in `mark`, and return the mark.

        Once a stream was waited for, the difference of two of its marks is the milliseconds between them.
        """
        ...

    def graph(self, enqueue: Step, stream: int) -> Step:
        """Capture what `enqueue` enqueues on a stream as a graph, without running it; return what launches it.

        If it cannot be captured, return `enqueue` itself; `uncaptured` says why.
        """
        ...

    def loop(self, body: Callable[[int], None], stream: int) -> Step | None:
        """Like `graph`, but what `body` enqueues is a loop's body: it runs once, and again until its condition is 0.

        `body` is given the condition's handle, as `specbuild_ring` takes it; the condition is 1 whenever the loop
        begins. Return None if it cannot be captured; `uncaptured` says why.
        """
        ...

    def reached(self, counter: NDArray[np.uint64], value: int, stream: int) -> bool:
        """Block until a pinned `counter[0]`, which work on a stream raises, is at least `value`, and return True.

        Return False if the whole stream has run without that; raise ExecutionError if some of it failed.
        """
        ...

    @property
    def capturing(self) -> bool:
        """Return whether a graph is being captured."""
        ...

    uncaptured: list[str]  # why graphs could not be captured, one line each
    identity: dict[str, Any]  # the hardware and software that step times are valid for

    def close(self) -> None:
        """Wait for everything and free it all; then raise the first error, if there was one."""
        ...


class Pages(Protocol):
    """Paged caches: of `count` pages of `rows` rows each slot has some; page 0 is nobody's.

    Slots share whole pages of a common prefix, and at most one slot writes a page.
    """

    rows: int
    count: int
    tensor: Tensor  # int32 [B, T]: each slot's pages, in row order

    @property
    def stale(self) -> bool:
        """Return whether `tensor` is older than what the slots have."""
        ...

    def slot_rows(self, slot: int) -> int:
        """Return how many rows the slot's pages have."""
        ...

    def needed(self, rows: int) -> int:
        """Return the number of pages that `rows` rows of a sequence need, at most as many as a slot can have."""
        ...

    def usable(self, slot: int, source: int, rows: int) -> int:
        """Return how many of the first `rows` rows of slot `source` a sequence in `slot` can keep."""
        ...

    def take(self, slot: int, source: int, rows: int, max_rows: int) -> bool:
        """Give an idle slot pages for `max_rows` rows, the first `rows` of `source`'s; return False for too few."""
        ...

    def release(self, slot: int, rows: int, spoiled: bool = False) -> None:
        """Mark a slot idle; its first `rows` rows stay. `spoiled`: whether its other pages may hold NaN."""
        ...

    def spoiled(self, slot: int) -> list[int]:
        """Return the slot's pages that may hold NaN, for the caller to erase, and forget that they do."""
        ...

    def update(self, stream: int) -> None:
        """Bring `tensor` up to date and wait until it is; nothing that runs meanwhile may read it."""
        ...
