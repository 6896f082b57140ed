"""Fuses a residual sum and the RMSNorm of it into one node."""

from __future__ import annotations

import onnx_ir as ir

from .pattern import FusionPass, dims, insert, producer, replace, same

EPSILON = 1e-5  # RMSNormalization's default


class FuseResidualNorm(FusionPass):
    """`RMSNormalization(Add(x, y), weight)` becomes `specbuild::AddRMSNorm(x, y, weight) → (norm, sum)`.

    x and y have one shape `[B, N, H]`, and the norm is over H. Pre: the graph has logits. Post: no such pair is left.
    """

    needs = ("logits",)
    left = "normalises a sum by itself"

    def find(self, node: ir.Node) -> ir.Node | None:
        """Return the residual sum that an RMSNorm normalizes; None if a node does not match."""
        add = producer(node.inputs[0], "Add") if node.op_type == "RMSNormalization" else None
        weight = node.inputs[1] if add else None
        if add is None or weight is None or not weight.is_initializer():
            return None
        first, second = (dims(value) or () for value in add.inputs)
        axis = node.attributes["axis"].as_int() if "axis" in node.attributes else -1
        return add if same(first, second) and len(first) == 3 and axis in (-1, 2) else None

    def rewrite(self, graph: ir.Graph, node: ir.Node, found: ir.Node) -> None:
        """See the class."""
        given = node.attributes.get("epsilon")
        attributes = {"epsilon": given.as_float() if given else EPSILON}
        new = insert(found, "AddRMSNorm", [*found.inputs, node.inputs[1]], "specbuild", attributes, outputs=2)
        for old, value in zip((node.outputs[0], found.outputs[0]), new.outputs, strict=True):
            replace(old, value)
        graph.remove(node, safe=True)
        graph.remove(found, safe=True)
