"""Makes constant the shape of Reshapes that keep batch and nodes, and removes those that change nothing."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .pattern import FusionPass, constant, dims, insert, replace, same


class StaticReshape(FusionPass):
    """`Reshape(x [B, N, …], computed shape) → [B, N, a, b]` becomes `Reshape(x, (0, 0, a, b))`, or x itself.

    Post: no Reshape takes a computed shape where its first two dimensions are those of its input.
    """

    left = "still computes its shape"

    def find(self, node: ir.Node) -> list[str | int]:
        """Return the output's shape if it is computed and keeps the first two dimensions, else []."""
        if node.op_type != "Reshape" or node.inputs[1] is None or node.inputs[1].producer() is None:
            return []
        before, after = dims(node.inputs[0]) or [], dims(node.outputs[0]) or []
        keeps = min(len(before), len(after)) >= 3 and same(before[:2], after[:2])
        return after if keeps and all(isinstance(dim, int) for dim in after[2:]) else []

    def rewrite(self, graph: ir.Graph, node: ir.Node, found: list[str | int]) -> None:
        """See the class."""
        value = node.inputs[0]
        assert value is not None
        if dims(value) != found:
            array = np.array([0, 0, *found[2:]], dtype=np.int64)
            shape = constant(graph, "shape_" + "_".join(map(str, found[2:])), array)
            value = insert(node, "Reshape", [value, shape]).outputs[0]
        replace(node.outputs[0], value)
        graph.remove(node, safe=True)
