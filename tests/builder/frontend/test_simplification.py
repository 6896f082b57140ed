"""Weights of a traced graph are named as the model's, and made when they are read."""

import numpy as np
import torch
from graphs import parse

from specbuild.builder.frontend.lazy_weights import Held
from specbuild.builder.frontend.simplification import name_weights, simplify

TWICE = """g (float[2, 2] x) => (float[2, 3] y, float[2, 3] z) <float[3, 2] w = {0, 0, 0, 0, 0, 0}> {
    t = Transpose <perm = [1, 0]> (w)
    u = Transpose <perm = [1, 0]> (w)
    y = MatMul (x, t)
    n = Neg (x)
    z = MatMul (n, u)
}"""


def test_a_weight_that_two_products_transpose_is_transposed_once():
    model, weight = parse(TWICE), torch.arange(6.0).reshape(3, 2)
    name_weights(model.graph, {"w": Held(weight)})
    simplify(model)
    (turned,) = {node.inputs[1] for node in model.graph if node.op_type == "MatMul"}
    np.testing.assert_array_equal(turned.const_value.numpy(), weight.numpy().T)
