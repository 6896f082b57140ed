"""Launches of kernels by the names of their structs' fields, and of what a step needs of its trees."""

from __future__ import annotations

from typing import Any

from specbuild.runtime.backends.gpu.device import Tensor
from specbuild.runtime.backends.gpu.executor import StandardExecutor
from specbuild.runtime.backends.kernels.abi import LAUNCHERS, Dtype
from specbuild.runtime.backends.kernels.interface import Kernels


def launch(kernels: Kernels, name: str, stream: int, **fields: Any) -> None:
    """Enqueue a kernel; tensors stand for the pointers of its struct, and fields that are not named are null or 0."""
    values = {key: value.address if isinstance(value, Tensor) else value for key, value in fields.items()}
    kernels.launch(name, LAUNCHERS[name](**values), stream)


def enqueue_tree_inputs(
    kernels: Kernels, executor: StandardExecutor, cache_len: Tensor, nodes: int, **fields: Any
) -> None:
    """Enqueue the inputs that tell a step its trees: masks, positions and rows, or TreeAttention's own inputs.

    Args:
        kernels: Kernels of the device.
        executor: Executor that runs the step.
        cache_len: Position of each slot's root, `int32[B]`.
        nodes: Nodes of the step.
        **fields: Other fields of `specbuild_mask`: parents, tree_nodes and counts, and tree_offset if it may not be 0.
    """
    model, tree, device, stream = executor.model, executor.model.tensors.tree, executor.device, executor.stream
    fields |= {"cache_len": cache_len, "batch": executor.batch_size, "nodes": nodes}
    fields |= {"capacity": executor.spec.capacity, "dtype": Dtype.BOOL}
    for window, mask in model.tensors.masks.items():
        out = {"output": mask, "window": window, "positions": model.tensors.positions, "rows": model.tensors.rows}
        launch(kernels, "tree_mask", stream, **fields, **out)
    if tree:
        launch(kernels, "tree_mask", stream, **fields, rows=tree.cache_len)
        shape = executor.batch_size, fields["tree_nodes"]
        device.copy_rows(tree.parents, Tensor(fields["parents"].address, shape, tree.parents.dtype), stream)
        device.copy(tree.counts, fields["counts"], stream)
        if "tree_offset" in fields:  # else it is 0, as the executor left it
            device.copy(tree.tree_offset, fields["tree_offset"], stream)
