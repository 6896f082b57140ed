"""Query, key and value in one matrix product."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes as passes

from .merge import MergeProducts

_NORMS = {"RMSNormalization", "LayerNormalization"}


class FuseQKV(MergeProducts):
    """The three `MatMul`s behind a `TreeAttention`'s query, key and value, biases included; see MergeProducts.

    Pre: the graph has a TreeAttention.
    """

    operators = frozenset({"TreeAttention"})
    through = frozenset({"Add", "Reshape", "Transpose", "RotaryEmbedding", "Clip"} | _NORMS)
    count = 3

    def requires(self, model: ir.Model) -> None:
        """See the class."""
        if not any(node.op_type == "TreeAttention" for node in model.graph):
            raise passes.PreconditionError("the graph has no TreeAttention")
