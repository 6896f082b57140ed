"""Launches of kernels by the names of their structs' fields, and of what a step needs of its trees."""

from __future__ import annotations

from typing import Any

import numpy as np

from specbuild.runtime.backends.gpu.device import Tensor
from specbuild.runtime.backends.gpu.executor import StandardExecutor
from specbuild.runtime.backends.kernels.abi import LAUNCHERS, Choose, Dtype
from specbuild.runtime.backends.kernels.interface import Kernels


class Launcher:
    """Enqueues kernels beside an executor's steps, on its stream."""

    def __init__(self, kernels: Kernels, executor: StandardExecutor) -> None:
        self._kernels, self._executor = kernels, executor

    def __call__(self, name: str, **fields: Any) -> None:
        """Enqueue a kernel; tensors stand for the pointers of its struct, and fields that are not named are null or 0.

        Its batch is the executor's.
        """
        fields |= {"batch": self._executor.batch_size}
        values = {key: value.address if isinstance(value, Tensor) else value for key, value in fields.items()}
        self._kernels.launch(name, LAUNCHERS[name](**values), self._executor.stream)

    def workspace(self, nodes: int, best: int) -> Tensor:
        """Allocate what the choice of the `best` tokens at so many nodes of each slot needs."""
        sizes = Choose(batch=self._executor.batch_size, nodes=nodes, vocab=self._executor.spec.vocab_size, best=best)
        return self._executor.device.empty((self._kernels.workspace(sizes),), np.uint8)

    def tree_inputs(self, cache_len: Tensor, nodes: int, **fields: Any) -> None:
        """Enqueue the inputs that describe a step's trees: masks, positions and rows, or TreeAttention's own inputs.

        Args:
            cache_len: Position of each slot's root, `int32[B]`.
            nodes: Nodes of the step.
            **fields: Other fields of `specbuild_mask`: parents, tree_nodes and counts, and tree_offset if it may not
                be 0.
        """
        executor, model = self._executor, self._executor.model
        device, stream, tree = executor.device, executor.stream, model.tensors.tree
        fields |= {"cache_len": cache_len, "nodes": nodes, "capacity": executor.spec.capacity, "dtype": Dtype.BOOL}
        for window, mask in model.tensors.masks.items():
            out = {"output": mask, "window": window, "positions": model.tensors.positions, "rows": model.tensors.rows}
            self("tree_mask", **fields, **out)
        if tree:
            self("tree_mask", **fields, rows=tree.cache_len)
            shape = executor.batch_size, fields["tree_nodes"]
            device.copy_rows(tree.parents, Tensor(fields["parents"].address, shape, tree.parents.dtype), stream)
            device.copy(tree.counts, fields["counts"], stream)
            if "tree_offset" in fields:  # else it is 0, as the executor left it
                device.copy(tree.tree_offset, fields["tree_offset"], stream)
