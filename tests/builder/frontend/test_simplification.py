"""Names of weights, and what is left of a graph when it has been simplified."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from specbuild.builder.frontend.simplification import name_weights, simplify
from specbuild.builder.passes.pattern import TRANSPOSED


def model(tied: bool = False) -> ir.Model:
    """x · Wᵀ, and the identity behind it; `tied`: W is looked up, too."""
    x = ir.val("x", ir.DataType.FLOAT, ir.Shape(["n", 3]))
    weight = ir.val("model.head.weight", const_value=ir.tensor(np.arange(6, dtype=np.float32).reshape(2, 3)))
    turned = ir.node("Transpose", [weight], {"perm": [1, 0]})
    product = ir.node("MatMul", [x, turned.outputs[0]])
    one = ir.val("one", const_value=ir.tensor(np.float32(1)))
    same = ir.node("Mul", [product.outputs[0], one])
    same.outputs[0].name = "y"
    nodes, inputs, outputs = [turned, product, same], [x], [same.outputs[0]]
    if tied:
        ids = ir.val("ids", ir.DataType.INT64, ir.Shape(["n"]))
        looked = ir.node("Gather", [weight, ids])
        looked.outputs[0].name = "rows"
        nodes, inputs, outputs = [*nodes, looked], [*inputs, ids], [*outputs, looked.outputs[0]]
    graph = ir.Graph(inputs, outputs, nodes=nodes, initializers=[weight, one], opset_imports={"": 23})
    return ir.Model(graph, ir_version=10)


def test_weights_have_the_model_s_names_and_are_turned_now() -> None:
    built = model()
    name_weights(built.graph)
    simplify(built)
    assert [node.op_type for node in built.graph if node.op_type != "Identity"] == ["MatMul"]
    turned = built.graph.initializers[f"head.weight{TRANSPOSED}"]
    assert turned.const_value is not None
    assert turned.const_value.numpy().tolist() == [[0, 3], [1, 4], [2, 5]]
