"""Selects the nodes whose logits are wanted, with one Gather along the node axis."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes as passes

from .pattern import FusionPass, insert, permutation, producer, replace


class GatherLogits(FusionPass):
    """`Transpose(GatherND(Transpose(x), Unsqueeze(i)))`, both swapping axes 0 and 1, becomes `Gather(x, i, axis=1)`.

    Pre: the graph has an input logit_nodes. Post: exactly one Gather takes it, and nothing else does.
    """

    needs = ("logit_nodes",)

    def find(self, node: ir.Node) -> list[ir.Node]:
        """Return the GatherND, the inner Transpose and the Unsqueeze behind a node; [] if it does not match."""
        gather = producer(node.inputs[0], "GatherND") if node.op_type == "Transpose" else None
        if gather is None or permutation(node)[:2] != (1, 0):
            return []
        swapped, index = producer(gather.inputs[0], "Transpose"), producer(gather.inputs[1], "Unsqueeze")
        return [gather, swapped, index] if swapped and index and permutation(swapped) == permutation(node) else []

    def rewrite(self, graph: ir.Graph, node: ir.Node, found: list[ir.Node]) -> None:
        """See the class."""
        _, swapped, index = found
        new = insert(node, "Gather", [swapped.inputs[0], index.inputs[0]], attributes={"axis": 1})
        replace(node.outputs[0], new.outputs[0])
        for dead in (node, *found):
            graph.remove(dead, safe=True)

    def ensures(self, model: ir.Model) -> None:
        """See the class."""
        (wanted,) = (value for value in model.graph.inputs if value.name == "logit_nodes")
        users = [use.node.op_type for use in wanted.uses()]
        if users != ["Gather"]:
            raise passes.PostconditionError(f"logit_nodes is used by {users}, not by one Gather")
