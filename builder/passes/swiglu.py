"""SwiGLU (Shazeer 2020): silu(gate) · up as one node."""

from __future__ import annotations

import onnx_ir as ir

from .pattern import FusionPass, insert, producer, replace


class FuseSwiGLU(FusionPass):
    """`Mul(Mul(g, Sigmoid(g)), u)` becomes `specbuild::SwiGLU(g, u)`."""

    def rewrite(self, graph: ir.Graph, node: ir.Node) -> bool:
        """See the class."""
        if node.op_type != "Mul":
            return False
        for silu_index in (0, 1):
            silu = producer(node.inputs[silu_index], "Mul")
            gate = _silu_input(silu)
            if silu is None or gate is None or len(list(silu.outputs[0].uses())) != 1:
                continue
            new = insert(node, "SwiGLU", [gate, node.inputs[1 - silu_index]], domain="specbuild")
            replace(node.outputs[0], new.outputs[0])
            graph.remove(node, safe=True)
            return True
        return False


def _silu_input(node: ir.Node | None) -> ir.Value | None:
    """x of Mul(x, Sigmoid(x)), either way round."""
    if node is None:
        return None
    for index in (0, 1):
        sigmoid = producer(node.inputs[index], "Sigmoid")
        if sigmoid is not None and sigmoid.inputs[0] is node.inputs[1 - index]:
            return sigmoid.inputs[0]
    return None
