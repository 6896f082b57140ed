"""FuseRMSNorm makes one node of a norm with a weight, which computes the same."""

from __future__ import annotations

import pytest
from graphs import apply, assert_same, kinds, normal, parse
from onnx_ir.passes import PostconditionError, PreconditionError

from specbuild.builder.passes import clean
from specbuild.builder.passes.rms_norm import FuseRMSNorm

NORM = """g (float[B, N, 4] x) => (float[B, N, 4] y)
    <float[4] w = {1, 2, 3, 4}, float two = {2}, float eps = {0.5}, int64[1] axes = {-1}> {
    square = Pow (x, two)
    mean = ReduceMean <keepdims = 1, noop_with_empty_axes = 0> (square, axes)
    shifted = Add (mean, eps)
    root = Sqrt (shifted)
    inverse = Reciprocal (root)
    normal = Mul (x, inverse)
    y = Mul (w, normal)
}"""
TURNED = NORM.replace("(w, normal)", "(normal, w)")
BARE = NORM.replace("y = Mul (w, normal)", "y = Neg (normal)")  # no weight


@pytest.mark.parametrize(("text", "matched"), [(NORM, 1), (TURNED, 1), (BARE, 0)], ids=["plain", "turned", "bare"])
def test_matches_a_norm_with_a_weight(text: str, matched: int) -> None:
    assert apply(FuseRMSNorm(), text)[0] == matched


@pytest.mark.parametrize("text", [NORM, TURNED], ids=["plain", "turned"])
def test_computes_the_same(text: str) -> None:
    _, model = apply(FuseRMSNorm(), text)
    clean(model)
    assert kinds(model) == {"RMSNormalization": 1}
    assert_same(model, text, {"x": normal(2, 5, 4)})


def test_needs_the_opset_that_has_the_operator() -> None:
    model = parse(NORM)
    model.graph.opset_imports[""] = 22
    with pytest.raises(PreconditionError, match="opset 23"):
        FuseRMSNorm()(model)


def test_promises_that_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbuild.builder.passes.rms_norm.onnx_fusions.fuse", lambda model: {})
    with pytest.raises(PostconditionError, match="was not matched"):
        FuseRMSNorm()(parse(NORM))
