"""Query, key and value in one matrix product."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes as passes

from .merge import merge, product_behind
from .pattern import FusionPass

_NORMS = {"RMSNormalization", "LayerNormalization"}
_THROUGH = frozenset({"Add", "Reshape", "Transpose", "RotaryEmbedding", "Clip"} | _NORMS)


class FuseQKV(FusionPass):
    """The three `MatMul`s behind a `TreeAttention`'s query, key and value become one and a `Split`, biases included.

    Pre: the graph has a TreeAttention. Post: no attention has three products of one input behind it.
    """

    def requires(self, model: ir.Model) -> None:
        """See the class."""
        if not any(node.op_type == "TreeAttention" for node in model.graph):
            raise passes.PreconditionError("the graph has no TreeAttention")

    def rewrite(self, graph: ir.Graph, node: ir.Node) -> bool:
        """See the class."""
        products = _products(node)
        return len(products) == 3 and merge(graph, products)

    def ensures(self, model: ir.Model) -> None:
        """See the class."""
        for node in model.graph:
            products = _products(node)
            if len(set(products)) == 3 and len({product.inputs[0] for product in products}) == 1:
                raise passes.PostconditionError(f"{node.name} has its query, key and value from three products")


def _products(node: ir.Node) -> list[ir.Node]:
    if node.op_type != "TreeAttention":
        return []
    return [product for product in (product_behind(value, _THROUGH) for value in node.inputs[:3]) if product]
