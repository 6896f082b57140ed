"""The selection of the nodes whose logits are wanted, as one Gather along the node axis."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes as passes

from .pattern import FusionPass, insert, permutation, producer, replace


class GatherLogits(FusionPass):
    """`Transpose(GatherND(Transpose(x), Unsqueeze(i)))`, both swapping axes 0 and 1, becomes `Gather(x, i, axis=1)`.

    Pre: the graph has an input logit_nodes. Post: exactly one Gather takes it, and nothing else does.
    """

    def requires(self, model: ir.Model) -> None:
        """See the class."""
        if not any(value.name == "logit_nodes" for value in model.graph.inputs):
            raise passes.PreconditionError("the graph has no input logit_nodes")

    def rewrite(self, graph: ir.Graph, node: ir.Node) -> bool:
        """See the class."""
        if node.op_type != "Transpose" or permutation(node)[:2] != (1, 0):
            return False
        gather = producer(node.inputs[0], "GatherND")
        if gather is None:
            return False
        swapped, index = producer(gather.inputs[0], "Transpose"), producer(gather.inputs[1], "Unsqueeze")
        if swapped is None or index is None or permutation(swapped) != permutation(node):
            return False
        new = insert(node, "Gather", [swapped.inputs[0], index.inputs[0]], attributes={"axis": 1})
        replace(node.outputs[0], new.outputs[0])
        for dead in (node, gather, swapped, index):
            graph.remove(dead, safe=True)
        return True

    def ensures(self, model: ir.Model) -> None:
        """See the class."""
        (wanted,) = (value for value in model.graph.inputs if value.name == "logit_nodes")
        users = [use.node.op_type for use in wanted.uses()]
        if users != ["Gather"]:
            raise passes.PostconditionError(f"logit_nodes is used by {users}, not by one Gather")
