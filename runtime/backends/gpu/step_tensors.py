"""The tensors of a model's steps, bound once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from specbuild.runtime.backends.executor import ModelSpec

from .device import Device, Tensor

Tensors = dict[str, Tensor]  # by the name of a graph's input or output


@dataclass(frozen=True, slots=True)
class TreeInputs:
    """TreeAttention's inputs in place of masks: node i's cache row is `cache_len + tree_offset + i`."""

    parents: Tensor  # int32 [B, M], of the whole tree; `prefill` steps longer than a bucket are chains
    cache_len: Tensor  # int32 [B]
    tree_offset: Tensor  # int32 [B]: tree nodes that are in the cache already
    counts: Tensor  # int32 [B]: how many of the N are nodes; padding is not written


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The tensors of steps of B slots and up to N nodes; N is the largest bucket.

    A step of n nodes reads and writes the beginning of each tensor, as if its shape had n in place of N.
    """

    tokens: Tensor  # int32 [B, N]
    positions: Tensor  # int32 [B, N]; with a `tree`, positions and rows are not read and there are no masks
    rows: Tensor  # int32 [B]: the cache row of each sequence's first node
    masks: dict[int, Tensor]  # bool [B, 1, N, S], by window: which cache rows a node sees; padding must see some
    tree: TreeInputs | None  # TreeAttention's inputs; None: attention in standard operators
    logits: Tensor  # float32 [B, N, V]
    hidden: Tensor | None  # float32 [B, N, H]: hidden states that the model writes, for an EAGLE-3 head
    hidden_in: Tensor | None  # float32 [B, N, H]: hidden states that a head reads
    cache: Tensor  # [2·layers, B, kv_heads, S, D]; keys of layer i at 2i, values at 2i + 1. Paged: B pages of S rows

    @classmethod
    def allocate(
        cls, device: Device, spec: ModelSpec, sizes: tuple[int, int, int], cache: Tensor, tree_nodes: int = 0
    ) -> StepTensors:
        """Allocate all but the cache.

        Args:
            device: The device.
            spec: The model.
            sizes: B, N, and the nodes of a prefill chunk, for which tensors of nodes also have room.
            cache: The cache.
            tree_nodes: Maximum nodes of TreeAttention's trees; 0: attention in standard operators.
        """
        batch, nodes, chunk = sizes

        def by_node(dtype: DTypeLike, *shape: int) -> Tensor:
            lines = -(-max(batch * nodes, chunk) // nodes)
            return device.empty((lines, *shape), dtype).view(batch, *shape)

        def vector() -> Tensor:
            return device.empty((batch,), np.int32)

        windows = () if tree_nodes else spec.windows
        parents = device.empty((batch, tree_nodes), np.int32) if tree_nodes else None
        return cls(
            tokens=by_node(np.int32, nodes),
            positions=by_node(np.int32, nodes),
            rows=vector(),
            masks={window: by_node(np.bool_, 1, nodes, spec.capacity) for window in windows},
            tree=TreeInputs(parents, vector(), vector(), vector()) if parents else None,
            logits=device.empty((batch, nodes, spec.vocab_size), np.float32),
            hidden=by_node(np.float32, nodes, spec.hidden) if spec.hidden else None,
            hidden_in=by_node(np.float32, nodes, spec.hidden) if spec.reads_hidden else None,
            cache=cache,
        )

    def ends(self, spec: ModelSpec, batch: int, nodes: int, logit_nodes: Tensor) -> tuple[Tensors, Tensors]:
        """Return a step's inputs and outputs but for attention's; `logit_nodes int32[n]`: the nodes with logits."""
        inputs = {"input_ids": self.tokens.view(batch, nodes), "logit_nodes": logit_nodes}
        outputs = {"logits": self.logits.view(batch, *logit_nodes.shape, spec.vocab_size)}
        if self.hidden_in:
            inputs["hidden_in"] = self.hidden_in.view(batch, nodes, spec.hidden)
        if self.hidden:
            outputs["hidden"] = self.hidden.view(batch, nodes, spec.hidden)
        return inputs, outputs

    def placed(self, batch: int, nodes: int) -> Tensors:
        """Return the inputs of attention in standard operators."""
        masks = {f"mask.{window}": mask.view(batch, 1, nodes, mask.shape[-1]) for window, mask in self.masks.items()}
        return {"position_ids": self.positions.view(batch, nodes), "write_rows": self.rows.view(batch), **masks}

    def caches(self, slot: int, slots: int) -> tuple[Tensors, Tensors]:
        """Return the inputs and outputs that are the caches of some slots."""
        names = [f"{kind}.{layer}" for layer in range(self.cache.shape[0] // 2) for kind in ("key", "value")]
        parts = [part.view(slots, *part.shape[1:]) for part in slot_parts(self.cache, slot)]
        past, present = ([f"{end}_{name}" for name in names] for end in ("past", "present"))
        return dict(zip(past, parts, strict=True)), dict(zip(present, parts, strict=True))


def slot_parts(cache: Tensor, slot: int = 0) -> list[Tensor]:
    """Return a slot's keys and values of each layer in the cache's order; `cache [2·layers, slots, heads, rows, D]`."""
    layers, slots, *shape = cache.shape
    size = cache.nbytes // (layers * slots)
    starts = (cache.address + (layer * slots + slot) * size for layer in range(layers))
    return [Tensor(start, (1, *shape), cache.dtype) for start in starts]
