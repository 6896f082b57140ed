"""Simplifies an exported graph: gives weights the model's names and removes what no language model needs."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common as common_passes
from onnxscript import optimizer, rewriter
from onnxscript.rewriter.rules import common as rules

from specbuild.builder.passes.pattern import TRANSPOSED

RULES = (
    *(rules.no_op_cast_rule, rules.cast_cast_rule, rules.no_op_expand_rule, rules.no_op_transpose_rule),
    *(rules.transpose_transpose_rule, rules.reshape_reshape_rule, rules.unsqueeze_unsqueeze_rule),
    *(rules.squeeze_reshape_1d_rule, rules.collapse_slice_rule, rules.collapse_slice2_rule),
    *(rules.cast_constant_of_shape_rule, rules.mul_by_1_rule, rules.add_0_rule),
)


def simplify(model: ir.Model) -> None:
    """Run onnxscript's optimizer without rules that match no language model: all rules take half of an export's time.

    Nothing is fused here; the passes fuse, and report it.
    """
    common_passes.InlinePass()(model)
    for _ in range(2):
        optimizer.fold_constants_ir(model, onnx_shape_inference=True, should_fold=_should_fold)
        rewriter.rewrite(model, RULES)
    for each in (
        common_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common_passes.DeduplicateInitializersPass(),
        common_passes.CommonSubexpressionEliminationPass(),
        common_passes.OutputFixPass(),
        common_passes.NameFixPass(),
    ):
        each(model)


def name_weights(graph: ir.Graph) -> None:
    """Name weights as the model does; append TRANSPOSED to the name of a transposed copy."""
    for value in list(graph.initializers.values()):
        value.name = str(value.name).removeprefix("model.")
        for use in value.uses():
            if use.node.op_type == "Transpose":
                use.node.outputs[0].name = f"{value.name}{TRANSPOSED}"


def _should_fold(node: ir.Node) -> bool | None:
    """Fold transposes of weights of any size, except of a head that is also the embedding; None for the default."""
    weight = node.inputs[0] if node.op_type == "Transpose" else None
    if weight is None or not weight.is_initializer():
        return None
    return not any(use.node.op_type == "Gather" for use in weight.uses())
