"""The interface of a compiled model that `StandardExecutor` drives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specbuild.runtime.backends.executor import ModelSpec

from .device import Pages
from .step_tensors import StepTensors


class Model(Protocol):
    """A compiled graph over B slots."""

    spec: ModelSpec
    batch_size: int  # B
    buckets: Sequence[int]  # node counts that a step may have, ascending
    chunk: int  # largest node count of `prefill`, at least the largest bucket
    tensors: StepTensors

    @property
    def capturable(self) -> bool:
        """Return whether a graph may hold its steps."""
        ...

    @property
    def lengths(self) -> Sequence[int]:
        """Node counts that `prefill` accepts, ascending."""
        ...

    @property
    def pages(self) -> Pages | None:
        """The pages of its cache; None: each slot has rows of its own."""
        ...

    def enqueue(self, nodes: int, stream: int) -> None:
        """Enqueue a step of all slots that gives all nodes' logits; `nodes` is one of `buckets`."""
        ...

    def prefill(self, slot: int, nodes: int, last: int, stream: int) -> None:
        """Enqueue a step of one slot, with tensors as for B = 1.

        Args:
            slot: The slot.
            nodes: The step's node count, one of `lengths`.
            last: The node whose logits become `logits[0, 0]`.
            stream: The stream.
        """
        ...

    def close(self) -> None:
        """Free everything but the device's memory."""
        ...
