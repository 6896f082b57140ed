"""FuseGateUp makes one product of an MLP's gate and up projections, which computes the same."""

from __future__ import annotations

import pytest
from graphs import WEIGHTS, apply, assert_same, kinds, normal, parse
from onnx_ir.passes import PostconditionError

from specbuild.builder.passes import clean
from specbuild.builder.passes.gate_up import FuseGateUp

GATE_UP = f"""g (float[B, N, 2] x) => (float[B, N, 1] y) {WEIGHTS} {{
    gate = MatMul (x, b)
    up = MatMul (x, c)
    active = Gelu (gate)
    y = Mul (active, up)
}}"""
GATE_UP_BIASES = GATE_UP.replace("gate = MatMul (x, b)", "g0 = MatMul (x, b)  gate = Add (g0, e)").replace(
    "up = MatMul (x, c)", "u0 = MatMul (x, c)  up = Add (u0, e)"
)
ONE_BIAS = GATE_UP.replace("gate = MatMul (x, b)", "g0 = MatMul (x, b)  gate = Add (g0, e)")
SQUARED = GATE_UP.replace("y = Mul (active, up)", "y = Mul (active, gate)")
UP_FIRST = GATE_UP.replace("Mul (active, up)", "Mul (up, active)")
SWIGLU = GATE_UP.replace("active = Gelu (gate)\n    y = Mul (active, up)", "y = specbuild.SwiGLU (gate, up)")


@pytest.mark.parametrize(
    ("text", "matched"),
    [(GATE_UP, 1), (GATE_UP_BIASES, 1), (ONE_BIAS, 1), (SQUARED, 0)],
    ids=["plain", "biases", "one bias", "squared"],
)
def test_matches_two_products_of_one_input(text: str, matched: int) -> None:
    assert apply(FuseGateUp(), text)[0] == matched


@pytest.mark.parametrize(
    "text",
    [GATE_UP, GATE_UP_BIASES, ONE_BIAS, UP_FIRST, SWIGLU],
    ids=["plain", "biases", "one bias", "up first", "swiglu"],
)
def test_one_product_computes_the_same(text: str) -> None:
    _, model = apply(FuseGateUp(), text)
    clean(model)
    assert (kinds(model)["MatMul"], kinds(model)["Split"]) == (1, 1)
    assert_same(model, text, {"x": normal(2, 5, 2)})


def test_a_bias_that_is_broadcast_stays_where_it_is() -> None:
    wide = GATE_UP_BIASES.replace("[2, 1] b = {5, 6}", "[2, 2] b = {5, 6, 7, 8}").replace(
        "[2, 1] c = {7, 8}", "[2, 2] c = {1, 2, 3, 4}"
    )
    text = wide.replace("float[B, N, 1] y", "float[B, N, 2] y")
    matched, model = apply(FuseGateUp(), text)
    assert matched == 1
    assert_same(model, text, {"x": normal(2, 5, 2)})


def test_layers_may_share_their_weights() -> None:
    text = GATE_UP.replace(
        "y = Mul (active, up)",
        """z = Mul (active, up)
    two = Concat <axis = -1> (z, z)
    gate2 = MatMul (two, b)
    up2 = MatMul (two, c)
    active2 = Gelu (gate2)
    y = Mul (active2, up2)""",
    )
    matched, model = apply(FuseGateUp(), text)
    assert matched == 2
    assert_same(model, text, {"x": normal(2, 5, 2)}, rtol=1e-5)


def test_promises_that_no_such_products_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FuseGateUp, "rewrite", lambda *_: None)
    with pytest.raises(PostconditionError, match="products of one input"):
        FuseGateUp()(parse(GATE_UP))
