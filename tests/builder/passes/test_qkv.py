"""FuseQKV makes one product of an attention's query, key and value, in their order and with their biases."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import SWIGLU, WEIGHTS, apply, assert_same, kinds, normal, parse
from onnx_ir.passes import PostconditionError, PreconditionError

from specbuild.builder.passes import clean
from specbuild.builder.passes.qkv import FuseQKV

QKV = f"""g (float[B, N, 2] x) => (float[B, N, 2] y) {WEIGHTS} {{
    q = MatMul (x, a)
    k = MatMul (x, b)
    v = MatMul (x, c)
    y, present_key, present_value = specbuild.TreeAttention (q, k, v)
}}"""
QKV_BIASES = QKV.replace("q = MatMul (x, a)", "p = MatMul (x, a)  q = Add (p, d)").replace(
    "k = MatMul (x, b)", "m = MatMul (x, b)  k = Add (e, m)"
)
OTHER_INPUT = QKV.replace("k = MatMul (x, b)", "z = Neg (x)  k = MatMul (z, b)")
HANDED_ON = "TreeAttention (q, k, v) => (y, pk, pv) { y = Identity (q)  pk = Identity (k)  pv = Identity (v) }"


@pytest.mark.parametrize(
    ("text", "matched"), [(QKV, 1), (QKV_BIASES, 1), (OTHER_INPUT, 0)], ids=["plain", "biases", "other input"]
)
def test_matches_three_products_of_one_input(text: str, matched: int) -> None:
    assert apply(FuseQKV(), text)[0] == matched


@pytest.mark.parametrize(("text", "adds"), [(QKV, 0), (QKV_BIASES, 2)], ids=["plain", "biases"])
def test_the_order_is_kept_and_so_are_biases(text: str, adds: int) -> None:
    """Biases that not every product has stay where they are."""
    _, model = apply(FuseQKV(), text)
    clean(model)
    (product,) = (node for node in model.graph if node.op_type == "MatMul")
    (attention,) = (node for node in model.graph if node.op_type == "TreeAttention")
    weight = product.inputs[1].const_value  # type: ignore[union-attr]
    np.testing.assert_array_equal(weight.numpy(), [[1, 2, 5, 7], [3, 4, 6, 8]])  # type: ignore[union-attr]
    assert kinds(model)["Add"] == adds
    assert attention.inputs[2].producer().op_type == "Split"  # type: ignore[union-attr]


@pytest.mark.parametrize("third", ["v = MatMul (x, c)", "n = MatMul (x, c)  v = Add (n, e)"], ids=["two", "three"])
def test_attention_takes_the_same_numbers(third: str) -> None:
    outputs = "float[B, N, 2] y, float[B, N, 1] present_key, float[B, N, 1] present_value"
    text = QKV_BIASES.replace("v = MatMul (x, c)", third).replace("float[B, N, 2] y", outputs)
    _, model = apply(FuseQKV(), text)
    assert_same(model, text, {"x": normal(2, 5, 2)}, HANDED_ON)


def test_needs_an_attention() -> None:
    with pytest.raises(PreconditionError, match="TreeAttention"):
        FuseQKV()(parse(SWIGLU))


def test_promises_that_no_such_products_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FuseQKV, "rewrite", lambda *_: None)
    with pytest.raises(PostconditionError, match="products of one input"):
        FuseQKV()(parse(QKV))
