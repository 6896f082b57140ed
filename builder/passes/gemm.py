"""Rewrites linear layers exported as Gemm (GPT-2's, OPT's) to the form that the other passes match."""

from __future__ import annotations

import onnx_ir as ir

from .pattern import FusionPass, insert, replace


class SplitGemm(FusionPass):
    """`Gemm(x, weight, bias)` becomes `MatMul(x, weight)`, or `MatMulNT` where it transposes the weight, and `Add`.

    Post: no Gemm of a weight is left that only multiplies and adds.
    """

    left = "is a Gemm that only multiplies and adds"

    def find(self, node: ir.Node) -> bool:
        """Return whether a node is such a Gemm."""
        weight = node.inputs[1] if node.op_type == "Gemm" else None
        factors = {name: node.attributes[name].as_float() for name in ("alpha", "beta") if name in node.attributes}
        turned = "transA" in node.attributes and node.attributes["transA"].as_int()
        return bool(weight and weight.is_initializer() and not turned and all(f == 1.0 for f in factors.values()))

    def rewrite(self, graph: ir.Graph, node: ir.Node, found: bool) -> None:
        """See the class."""
        transposed = "transB" in node.attributes and node.attributes["transB"].as_int()
        operator, domain = ("MatMulNT", "specbuild") if transposed else ("MatMul", "")
        result = insert(node, operator, node.inputs[:2], domain).outputs[0]
        result.shape, result.type = node.outputs[0].shape, node.outputs[0].type
        if len(node.inputs) > 2 and node.inputs[2] is not None:
            result = insert(node, "Add", [result, node.inputs[2]]).outputs[0]
        replace(node.outputs[0], result)
        graph.remove(node, safe=True)
