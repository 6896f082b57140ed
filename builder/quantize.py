"""INT8 weights: symmetric, in blocks of one row of a matrix, computed with as they are stored.

A weight `[K, N]` becomes `uint8[N, blocks, size]` and one float32 scale per block: w ≈ scale · (q − 128), scale =
max |w| / 127. Matrix products, the head and the token embedding are quantized; norms, biases, positions and routed
experts stay in float32. An embedding that is the head too is stored once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from .passes.pattern import FusionPass, dims, initializer, insert, replace

BLOCKS = (128, 64, 32, 16)  # the largest that divides a row; accuracy hardly differs, larger ones are faster
ZERO = 128


class QuantizeInt8(FusionPass):
    """`MatMul(x, w)`, `MatMulNT(x, w)` and `Gather(w, input_ids)` become `specbuild::BlockMatMul` and `BlockGather`.

    Both take the quantized weight and its scales; their attribute `columns` is K.
    """

    def __init__(self) -> None:
        super().__init__()
        self._quantized: dict[tuple[str, bool], tuple[ir.Value, ir.Value]] = {}

    def rewrite(self, graph: ir.Graph, node: ir.Node) -> bool:
        """See the class."""
        found = _weight(node)
        if found is None:
            return False
        operator, data, weight, transposed = found
        columns = int(dims(weight)[0 if transposed else 1])  # type: ignore[index]
        size = next((size for size in BLOCKS if columns % size == 0), None)
        if size is None:
            return False
        key = str(weight.name), transposed
        if key not in self._quantized:
            self._quantized[key] = _initializers(graph, weight, size, transposed)
        new = insert(node, operator, [data, *self._quantized[key]], "specbuild", {"columns": columns})
        replace(node.outputs[0], new.outputs[0])
        graph.remove(node, safe=True)
        return True


def _weight(node: ir.Node) -> tuple[str, ir.Value, ir.Value, bool] | None:
    """The operator that is to replace a node, its data, its weight, and whether that lies as `[K, N]`."""
    kinds = {"MatMul": ("BlockMatMul", 0, 1, True), "MatMulNT": ("BlockMatMul", 0, 1, False)}
    kinds["Gather"] = ("BlockGather", 1, 0, False)
    if node.op_type not in kinds:
        return None
    operator, data, weight, transposed = kinds[node.op_type]
    x, w = node.inputs[data], node.inputs[weight]
    if x is None or w is None or not w.is_initializer() or len(dims(w) or ()) != 2:
        return None
    if operator == "BlockGather" and x.name != "input_ids":
        return None
    return operator, x, w, transposed


def _initializers(graph: ir.Graph, weight: ir.Value, size: int, transposed: bool) -> tuple[ir.Value, ir.Value]:
    assert weight.const_value is not None
    array = weight.const_value.numpy()
    quantized, scales = to_blocks(array.T if transposed else array, size)
    name = f"{weight.name}_{'columns' if transposed else 'rows'}"
    named = (f"{name}_int8", quantized), (f"{name}_scales", scales)
    first, second = (initializer(graph, ir.tensor(content, name=name)) for name, content in named)
    return first, second


def to_blocks(rows: NDArray[np.float32], size: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """`rows [N, K]` as `uint8[N, K/size, size]` and scales `float32[N, K/size]`."""
    blocks = rows.reshape(len(rows), -1, size)
    scales = np.abs(blocks).max(axis=2) / np.float32(127)
    quantized = np.rint(blocks / np.maximum(scales, np.finfo(np.float32).tiny)[..., None]) + ZERO
    return quantized.astype(np.uint8), scales.astype(np.float32)


QUANTIZERS: dict[str, Callable[[], FusionPass]] = {"int8": QuantizeInt8}
