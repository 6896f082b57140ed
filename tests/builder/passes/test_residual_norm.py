"""FuseResidualNorm makes one node of a residual sum and its norm, which hands the sum on."""

from __future__ import annotations

import pytest
from graphs import SWIGLU, apply, assert_same, kinds, normal, parse
from onnx_ir.passes import PostconditionError, PreconditionError

from specbuild.builder.passes.residual_norm import FuseResidualNorm

RESIDUAL = """g (float[B, N, 4] x, float[B, N, 4] u) => (float[B, N, 4] logits, float[B, N, 4] sum)
    <float[4] w = {1, 2, 3, 4}> {
    sum = Add (x, u)
    logits = RMSNormalization <axis = -1, epsilon = 0.25> (sum, w)
}"""
BIASED = RESIDUAL.replace("Add (x, u)", "Add (x, w)")
TWO_NORMS = RESIDUAL.replace("=> (", "=> (float[B, N, 4] other, ").replace(
    "\n}", "\n    other = RMSNormalization <axis = -1, epsilon = 0.5> (sum, w)\n}"
)


@pytest.mark.parametrize(("text", "matched"), [(RESIDUAL, 1), (BIASED, 0)], ids=["residual", "bias"])
def test_matches_a_sum_of_two_states(text: str, matched: int) -> None:
    assert apply(FuseResidualNorm(), text)[0] == matched


def test_the_sum_is_handed_on() -> None:
    _, model = apply(FuseResidualNorm(), RESIDUAL)
    (node,) = model.graph
    assert [value.name for value in node.inputs if value] == ["x", "u", "w"]
    assert [value.name for value in node.outputs] == ["logits", "sum"]
    assert node.attributes["epsilon"].as_float() == 0.25


@pytest.mark.parametrize("text", [RESIDUAL, TWO_NORMS], ids=["one norm", "two norms"])
def test_computes_the_same(text: str) -> None:
    matched, model = apply(FuseResidualNorm(), text)
    assert (matched, kinds(model)["Add"], kinds(model)["AddRMSNorm"]) == (1, 0, 1)
    assert_same(model, text, {"x": normal(2, 5, 4), "u": normal(2, 5, 4)[::-1]})


def test_needs_logits() -> None:
    with pytest.raises(PreconditionError, match="logits"):
        FuseResidualNorm()(parse(SWIGLU))


def test_promises_that_no_such_pair_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FuseResidualNorm, "rewrite", lambda *_: None)
    with pytest.raises(PostconditionError, match="normalises a sum by itself"):
        FuseResidualNorm()(parse(RESIDUAL))


@pytest.mark.parametrize(
    ("text", "matched"),
    [
        (RESIDUAL.replace("axis = -1", "axis = 2"), 1),
        (RESIDUAL.replace("axis = -1, ", ""), 1),
        (
            RESIDUAL.replace("axis = -1", "axis = 1").replace(
                "float[4] w = {1, 2, 3, 4}", "float[1, 4] w = {1, 2, 3, 4}"
            ),
            0,
        ),
        (RESIDUAL.replace("[B, N, 4] x, float[B, N, 4] u", "[?, ?, 4] x, float[?, ?, 4] u"), 0),
    ],
    ids=["the last axis", "the default axis", "another axis", "shapes without names"],
)
def test_only_norms_over_the_width_of_sums_of_one_shape(text: str, matched: int) -> None:
    assert apply(FuseResidualNorm(), text)[0] == matched


def test_an_epsilon_that_is_not_said_is_the_operators_own() -> None:
    text = RESIDUAL.replace(", epsilon = 0.25", "")
    matched, model = apply(FuseResidualNorm(), text)
    assert (matched, next(iter(model.graph)).attributes["epsilon"].as_float()) == (1, pytest.approx(1e-5))
    assert_same(model, text, {"x": 1e-3 * normal(2, 5, 4), "u": 0 * normal(2, 5, 4)})
