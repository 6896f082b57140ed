"""Simplifies an exported graph: gives weights the model's names and removes what no language model needs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes import common as common_passes
from onnxscript import optimizer, rewriter
from onnxscript.rewriter.rules import common as rules

from specbuild.builder.passes.pattern import (
    TRANSPOSED,
    dims,
    initializer,
    numbers_of,
    permutation,
    recipe,
    replace,
)

from .lazy_weights import Weight, check_finite

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
    turn_weights(model.graph)
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


def name_weights(graph: ir.Graph, weights: Mapping[str, Weight]) -> None:
    """Name weights as the model does, and make them recipes; a transposed one gets TRANSPOSED behind its name."""
    for value in list(graph.initializers.values()):
        value.name = str(value.name).removeprefix("model.")
        if value.name in weights:
            value.const_value = of_weight(value.name, weights[value.name])
        for use in list(value.uses()):
            if use.node.op_type == "Transpose":
                use.node.outputs[0].name = f"{value.name}{TRANSPOSED}"


def of_weight(name: str, weight: Weight) -> ir.TensorProtocol:
    """Return the recipe of a model's weight in float32; a number that is not finite is an error when it is read."""

    def make() -> NDArray[np.float32]:
        tensor = weight.read()
        check_finite(name, tensor)
        return np.asarray(tensor.numpy())

    return recipe(name, ir.DataType.FLOAT, weight.shape, make)


def turn_weights(graph: ir.Graph) -> None:
    """Turn transposes of weights into recipes, except of a head that is also the embedding."""
    for node in list(graph):
        weight = node.inputs[0] if node.op_type == "Transpose" else None
        if weight is None or not weight.is_initializer() or permutation(node) != (1, 0):
            continue
        if any(use.node.op_type == "Gather" for use in weight.uses()):
            continue
        name, shape = str(node.outputs[0].name), [int(size) for size in dims(weight) or ()]
        if name not in graph.initializers:
            dtype = weight.dtype or ir.DataType.FLOAT
            initializer(graph, recipe(name, dtype, shape[::-1], partial(_turned, weight)))
        replace(node.outputs[0], graph.initializers[name])
        graph.remove(node, safe=True)


def _turned(weight: ir.Value) -> NDArray[Any]:
    return numbers_of(weight).T


def _should_fold(node: ir.Node) -> bool | None:
    """Fold no weight, which would be read; None for the default, which folds small constants."""
    return False if any(value is not None and _large(value) for value in node.inputs) else None


def _large(value: ir.Value) -> bool:
    return isinstance(value.const_value, ir.LazyTensor) and len(value.const_value.shape) > 1
