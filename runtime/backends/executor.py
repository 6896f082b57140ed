"""The seam between the loop and what runs the models: the executor protocol.

The loop knows no backend; a backend knows no policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.bundle.manifest import Manifest


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What an executor has to know of a compiled model; sizes in elements and rows, windows in positions (0: all)."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    capacity: int
    max_nodes: int  # of one step input
    windows: tuple[int, ...] = (0,)  # those its layers have, each once
    max_positions: int = 1 << 30  # that it was made for; drafted nodes may lie beyond, and are never emitted there
    hidden: int = 0  # width of the rows of hidden states that it writes
    reads_hidden: bool = False  # and whether it reads such rows, too


@dataclass(slots=True)
class StepInput:
    """One sequence's part of a step: nodes that are new to its cache.

    Node i's row goes to cache row `start + i`. It sees every row before `committed`, and of the rows from there on
    itself and those that `visible` (`bool[n, start + n − committed]`) names; None: all rows up to its own, a chain.
    In a layer with a window of w it sees of those only the rows of the last w positions, its own included.
    `logits`: for how many of the nodes, counted from the last, logits are wanted. `hidden`: a row `[n, H]` for each
    node, of a model that reads hidden states.
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
    """A compiled model with its cache, for `batch_size` sequences at once."""

    spec: ModelSpec
    batch_size: int
    seconds: float  # spent executing the model since it was loaded

    @property
    def identity(self) -> dict[str, Any]:
        """What its times are true of: the processor, and what computes on it."""
        ...

    @property
    def buckets(self) -> Sequence[int] | None:
        """The node counts that its steps are padded to, ascending; None where every count has a step of its own."""
        ...

    def step(self, inputs: Sequence[StepInput]) -> list[NDArray[np.float32]]:
        """Run one step; per input `float32[logits, V]`, the caller's to overwrite until the next step.

        Raises ExecutionError."""
        ...

    def commit(self, slot: int, rows: Sequence[int], start: int) -> None:
        """Move cache rows to `start, start + 1, …`; everything from `start + len(rows)` on becomes garbage."""
        ...

    def copy(self, slot: int, source: int, rows: int) -> None:
        """Copy the first rows of another slot's cache, all of them committed, to the same ones of `slot`."""
        ...

    def hidden(self, slot: int) -> NDArray[np.float32]:
        """The hidden states of a slot's tokens, one for each row of its cache: `[S, H]`; H is 0 where none are kept."""
        ...

    def erase(self, slot: int) -> None:
        """Nothing that was written in a slot may reach a step of another text: a row may be no number."""
        ...

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache."""
        ...

    def close(self) -> None:
        """Free the model and its cache."""
        ...


def share_rows(executor: Executor, slot: int, source: int, rows: int) -> None:
    """Give a slot the first rows of another's cache, or of its own, and no more; they are committed."""
    if source != slot and rows:
        executor.copy(slot, source, rows)
    executor.commit(slot, (), rows)


def spec_of(manifest: Manifest, name: str) -> ModelSpec:
    """What an executor has to know of one of a bundle's models."""
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
        reads_hidden=model.kind == "eagle3",
    )
