"""The interface between the decoding loop and the backends: the executor protocol.

The loop knows no backend; a backend knows no speculation policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.bundle.manifest import CacheShape, Manifest


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A compiled model's sizes that an executor needs: sizes in elements and rows, windows in positions (0: all)."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    capacity: int
    max_nodes: int  # in one step input
    windows: tuple[int, ...] = (0,)  # the distinct attention windows of its layers
    max_positions: int = 1 << 30  # of the model; drafted nodes may lie beyond, and are never emitted there
    hidden: int = 0  # width of the hidden states that it writes; 0: it writes none
    reads_hidden: bool = False  # whether it also reads hidden states of this width
    caches: tuple[CacheShape, ...] = ()  # each layer's, if they are not all of `kv_heads` and `head_dim`

    @property
    def shapes(self) -> tuple[CacheShape, ...]:
        """The cache of each layer."""
        return self.caches or (CacheShape(self.kv_heads, self.head_dim, self.head_dim),) * self.layers


@dataclass(slots=True)
class StepInput:
    """One sequence's part of a step: nodes that are new to its cache.

    Node i is written to cache row `start + i`. It sees every row before `committed`. From row `committed` on it sees
    the rows that `visible` (`bool[n, start + n − committed]`) marks, its own included; with None (a chain), all rows up
    to its own. In a layer with window w, of these only the rows of the last w positions, its own included, remain
    visible.

    `logits`: how many nodes, counted from the last, need logits. `hidden`: `float32[n, H]`, a row per node, if the
    model reads hidden states.
    """

    slot: int
    start: int
    committed: int
    tokens: Sequence[int]
    positions: Sequence[int]
    visible: NDArray[np.bool_] | None
    logits: int
    hidden: NDArray[np.float32] | None = None


class Executor(Protocol):
    """A compiled model and its KV cache, for `batch_size` sequences at once."""

    spec: ModelSpec
    batch_size: int
    seconds: float  # spent executing the model since it was loaded

    @property
    def identity(self) -> dict[str, Any]:
        """The hardware and software that its step times are valid for."""
        ...

    @property
    def buckets(self) -> Sequence[int] | None:
        """The node counts that steps are padded to, ascending; None if every node count has its own step shape."""
        ...

    def step(self, inputs: Sequence[StepInput]) -> list[NDArray[np.float32]]:
        """Run one step and return `float32[logits, V]` for each input; the caller may overwrite it until the next step.

        Raises:
            ExecutionError: If an input does not fit, or the step fails.
        """
        ...

    def commit(self, slot: int, rows: Sequence[int], start: int) -> None:
        """Move cache `rows` to rows `start, start + 1, …`; everything from `start + len(rows)` on becomes garbage."""
        ...

    def copy(self, slot: int, source: int, rows: int) -> None:
        """Copy the first `rows` cache rows of slot `source`, all of them committed, to the same rows of `slot`."""
        ...

    def hidden(self, slot: int) -> NDArray[np.float32]:
        """Return the hidden states of a slot's tokens, `float32[S, H]`, one per cache row; H is 0 if none are kept."""
        ...

    def erase(self, slot: int) -> None:
        """Clear a slot whose rows may hold NaN, so that nothing in it can reach a step of another sequence."""
        ...

    @property
    def cache_bytes(self) -> int:
        """Size of the cache in bytes."""
        ...

    def close(self) -> None:
        """Free the model and its cache."""
        ...


def share_rows(executor: Executor, slot: int, source: int, rows: int) -> None:
    """Make the first `rows` cache rows of `source` (or of the slot itself) a slot's only committed rows."""
    if source != slot and rows:
        executor.copy(slot, source, rows)
    executor.commit(slot, (), rows)


def spec_of(manifest: Manifest, name: str) -> ModelSpec:
    """Return what an executor needs to know about one of a bundle's models."""
    model = manifest.models[name]
    return ModelSpec(
        name=name,
        layers=model.layers,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab_size,
        capacity=model.capacity,
        max_nodes=manifest.buckets[-1],
        windows=tuple(model.windows),
        max_positions=model.max_positions,
        hidden=model.hidden,
        reads_hidden=model.is_head,
        caches=tuple(model.caches),
    )
