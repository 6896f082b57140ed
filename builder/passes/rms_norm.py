"""Fuses RMSNorm (Zhang, Sennrich 2019) into one node, by onnxscript's own rule."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes as passes
from onnxscript.rewriter import onnx_fusions

from .pattern import FusionPass, producer


class FuseRMSNorm(FusionPass):
    """`x · Reciprocal(Sqrt(ReduceMean(x²) + ε)) · weight` becomes `RMSNormalization(x, weight)`.

    Pre: opset 23, which has the operator. Post: no such chain with a weight is left.
    """

    left = "is the end of an RMSNorm that was not matched"

    def requires(self, model: ir.Model) -> None:
        """See the class."""
        if model.graph.opset_imports.get("") != 23:
            raise passes.PreconditionError("RMSNormalization needs a graph of opset 23")

    def call(self, model: ir.Model) -> passes.PassResult:
        """See the class."""
        self.matched = onnx_fusions.fuse(model).get("RMSNormalization", 0)
        return passes.PassResult(model, modified=self.matched > 0)

    def find(self, node: ir.Node) -> bool:
        """Return whether a node is the end of such a chain."""
        return node.op_type == "Mul" and any(_weighted_norm(node, at) for at in (0, 1))


def _weighted_norm(node: ir.Node, at: int) -> bool:
    """Return whether a product multiplies a weight by `x · Reciprocal(Sqrt(ReduceMean(…) + ε))`, its input `at`."""
    weight, normalized = node.inputs[1 - at], producer(node.inputs[at], "Mul")
    reciprocal = producer(normalized.inputs[1], "Reciprocal") if normalized else None
    root = producer(reciprocal.inputs[0], "Sqrt") if reciprocal else None
    mean = producer(root.inputs[0], "Add") if root else None
    return bool(weight and weight.is_initializer() and mean and producer(mean.inputs[0], "ReduceMean"))
