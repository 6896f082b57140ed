"""Rewrites sums over a row of numbers to products, whose bits do not depend on how many rows there are."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .pattern import FusionPass, constant, dims, insert, replace

ALIGNED = 16  # float32 numbers of the widest vector, after which every row begins in the same way


class RowSum(FusionPass):
    """`ReduceSum(x [..., N], -1)` becomes `MatMul(x, ones [N, 1])` where N > 2 is no multiple of ALIGNED.

    ONNX Runtime's sum of a row has other bits alone than among others: seen where ERNIE 4.5 adds six experts' shares.
    Post: no such sum is left.
    """

    left = "is a sum over rows of no whole vectors"

    def find(self, node: ir.Node) -> int:
        """Return the length of the rows if a node is such a sum, else 0."""
        if node.op_type != "ReduceSum" or len(node.inputs) < 2:
            return 0
        x, axis = node.inputs[:2]
        if x is None or axis is None or x.dtype != ir.DataType.FLOAT:
            return 0
        keeps = "keepdims" not in node.attributes or node.attributes["keepdims"].as_int()
        shape, axes = dims(x), ir.convenience.get_const_tensor(axis)
        if not keeps or not shape or axes is None or axes.numpy().tolist() not in ([-1], [len(shape) - 1]):
            return 0
        length = shape[-1] if isinstance(shape[-1], int) else 0
        return length if length > 2 and length % ALIGNED else 0  # two numbers have one sum

    def rewrite(self, graph: ir.Graph, node: ir.Node, found: int) -> None:
        """See the class."""
        ones = constant(graph, f"ones_{found}", np.ones((found, 1), dtype=np.float32))
        result = insert(node, "MatMul", [node.inputs[0], ones]).outputs[0]
        replace(node.outputs[0], result)
        graph.remove(node, safe=True)
