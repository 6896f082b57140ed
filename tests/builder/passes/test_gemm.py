"""SplitGemm makes a product and a sum of a Gemm that only multiplies and adds."""

from __future__ import annotations

import pytest
from graphs import apply, assert_same, kinds, normal, parse
from onnx_ir.passes import PostconditionError

from specbuild.builder.passes.gemm import SplitGemm

GEMM = """g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] a = {1, 2, 3, 4}, float[2] d = {9, 10}> {
    y = Gemm (x, a, d)
}"""
NO_BIAS = GEMM.replace("(x, a, d)", "(x, a)")
TURNED = GEMM.replace("Gemm (", "Gemm <transB = 1> (")
SCALED = GEMM.replace("Gemm (", "Gemm <alpha = 2.0> (")
TURNED_INPUT = GEMM.replace("Gemm (", "Gemm <transA = 1> (")


@pytest.mark.parametrize(
    ("text", "matched"),
    [(GEMM, 1), (NO_BIAS, 1), (TURNED, 1), (SCALED, 0), (TURNED_INPUT, 0)],
    ids=["plain", "no bias", "weight turned", "scaled", "input turned"],
)
def test_matches_what_only_multiplies_and_adds(text: str, matched: int) -> None:
    assert apply(SplitGemm(), text)[0] == matched


@pytest.mark.parametrize(
    ("text", "nodes"),
    [(GEMM, {"MatMul": 1, "Add": 1}), (NO_BIAS, {"MatMul": 1}), (TURNED, {"MatMulNT": 1, "Add": 1})],
    ids=["plain", "no bias", "weight turned"],
)
def test_computes_the_same(text: str, nodes: dict[str, int]) -> None:
    _, model = apply(SplitGemm(), text)
    assert kinds(model) == nodes
    assert_same(model, text, {"x": normal(5, 2)})


def test_promises_that_no_such_gemm_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SplitGemm, "rewrite", lambda *_: None)
    with pytest.raises(PostconditionError, match="only multiplies and adds"):
        SplitGemm()(parse(GEMM))
