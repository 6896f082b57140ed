"""Fuses SwiGLU (Shazeer 2020), silu(gate) · up, into one node."""

from __future__ import annotations

import onnx_ir as ir

from .pattern import FusionPass, insert, producer, replace


class FuseSwiGLU(FusionPass):
    """`Mul(Mul(g, Sigmoid(g)), u)` becomes `specbuild::SwiGLU(g, u)`."""

    left = "is a SwiGLU by itself"

    def find(self, node: ir.Node) -> list[ir.Value | None]:
        """Return g and u; [] if a node does not match."""
        for index in (0, 1) if node.op_type == "Mul" else ():
            silu = producer(node.inputs[index], "Mul")
            gate = _silu_input(silu)
            if silu and gate and len(list(silu.outputs[0].uses())) == 1:
                return [gate, node.inputs[1 - index]]
        return []

    def rewrite(self, graph: ir.Graph, node: ir.Node, found: list[ir.Value | None]) -> None:
        """See the class."""
        replace(node.outputs[0], insert(node, "SwiGLU", found, domain="specbuild").outputs[0])
        graph.remove(node, safe=True)


def _silu_input(node: ir.Node | None) -> ir.Value | None:
    """Return x of `Mul(x, Sigmoid(x))`, in either order; None for any other node."""
    if node is None:
        return None
    for index in (0, 1):
        sigmoid = producer(node.inputs[index], "Sigmoid")
        if sigmoid is not None and sigmoid.inputs[0] is node.inputs[1 - index]:
            return sigmoid.inputs[0]
    return None
