"""Lets a tied head read the embedding as it is stored, neither transposed in every step nor stored twice."""

from __future__ import annotations

import onnx_ir as ir

from .pattern import FusionPass, insert, permutation, producer, replace


class FoldTiedHead(FusionPass):
    """`MatMul(x, Transpose(weight))` becomes `specbuild::MatMulNT(x, weight)`, x · weightᵀ.

    Post: no weight is transposed at run time.
    """

    left = "transposes a weight in every step"

    def find(self, node: ir.Node) -> ir.Node | None:
        """Return the Transpose of a weight behind a product; None if a node does not match."""
        transpose = producer(node.inputs[1], "Transpose") if node.op_type == "MatMul" else None
        if transpose is None or transpose.inputs[0] is None or permutation(transpose) != (1, 0):
            return None
        return transpose if transpose.inputs[0].is_initializer() else None

    def rewrite(self, graph: ir.Graph, node: ir.Node, found: ir.Node) -> None:
        """See the class."""
        new = insert(node, "MatMulNT", [node.inputs[0], found.inputs[0]], domain="specbuild")
        replace(node.outputs[0], new.outputs[0])
        graph.remove(node, safe=True)
