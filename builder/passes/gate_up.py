"""An MLP's gate and up projections in one matrix product."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes as passes

from .merge import merge, product_behind
from .pattern import FusionPass

_THROUGH = frozenset({"Add", "Gelu", "Relu"})


class FuseGateUp(FusionPass):
    """The two `MatMul`s of one input behind a `SwiGLU`, or behind `Mul(activation(g), u)`, become one and a `Split`.

    Post: no such pair is left.
    """

    def rewrite(self, graph: ir.Graph, node: ir.Node) -> bool:
        """See the class."""
        products = _products(node)
        return len(products) == 2 and merge(graph, products)

    def ensures(self, model: ir.Model) -> None:
        """See the class."""
        for node in model.graph:
            products = _products(node)
            if len(set(products)) == 2 and len({product.inputs[0] for product in products}) == 1:
                raise passes.PostconditionError(f"{node.name} has its gate and up from two products")


def _products(node: ir.Node) -> list[ir.Node]:
    if node.op_type not in ("SwiGLU", "Mul"):
        return []
    return [product for product in (product_behind(value, _THROUGH) for value in node.inputs[:2]) if product]
