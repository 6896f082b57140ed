"""Reshapes that keep batch and nodes: their shape becomes a constant, and those that change nothing go."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnx_ir.passes as passes

from .pattern import FusionPass, constant, dims, insert, replace


class StaticReshape(FusionPass):
    """`Reshape(x [B, N, …], computed shape) → [B, N, a, b]` becomes `Reshape(x, (0, 0, a, b))`, or x itself.

    Post: no Reshape takes a computed shape where its first two dimensions are those of its input.
    """

    def rewrite(self, graph: ir.Graph, node: ir.Node) -> bool:
        """See the class."""
        if not _computes_shape(node):
            return False
        before, after = dims(node.inputs[0]), dims(node.outputs[0])
        if not _keeps_leading(before, after):
            return False
        assert before is not None
        assert after is not None
        if before == after:
            replace(node.outputs[0], node.inputs[0])  # type: ignore[arg-type]
            graph.remove(node, safe=True)
            return True
        shape = constant(graph, "shape_" + "_".join(map(str, after[2:])), np.array([0, 0, *after[2:]], dtype=np.int64))
        new = insert(node, "Reshape", [node.inputs[0], shape])
        replace(node.outputs[0], new.outputs[0])
        graph.remove(node, safe=True)
        return True

    def ensures(self, model: ir.Model) -> None:
        """See the class."""
        for node in model.graph:
            if _computes_shape(node) and _keeps_leading(dims(node.inputs[0]), dims(node.outputs[0])):
                raise passes.PostconditionError(f"{node.name} still computes its shape")


def _computes_shape(node: ir.Node) -> bool:
    return node.op_type == "Reshape" and node.inputs[1] is not None and node.inputs[1].producer() is not None


def _keeps_leading(before: list[str | int] | None, after: list[str | int] | None) -> bool:
    if before is None or after is None or len(before) < 3 or len(after) < 3:
        return False
    return before[:2] == after[:2] and all(isinstance(dim, int) for dim in after[2:])
