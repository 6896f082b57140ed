"""FoldTiedHead reads an embedding that is the head too as it lies."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import apply, assert_same, kinds, normal, parse
from onnx_ir.passes import PostconditionError

from specbuild.builder.passes import clean
from specbuild.builder.passes.tied_head import FoldTiedHead

TIED = """g (float[B, N, 2] x, int64[B, N] i) => (float[B, N, 3] logits, float[B, N, 2] rows)
    <float[3, 2] w = {1, 2, 3, 4, 5, 6}> {
    rows = Gather (w, i)
    t = Transpose <perm = [1, 0]> (w)
    logits = MatMul (x, t)
}"""
COMPUTED = TIED.replace("Transpose <perm = [1, 0]> (w)", "Transpose <perm = [0, 2, 1]> (x)").replace(
    "[B, N, 3]", "[B, N, N]"
)


@pytest.mark.parametrize(("text", "matched"), [(TIED, 1), (COMPUTED, 0)], ids=["tied", "computed"])
def test_matches_a_weight_that_is_transposed_at_run_time(text: str, matched: int) -> None:
    assert apply(FoldTiedHead(), text)[0] == matched


def test_a_tied_head_is_stored_once() -> None:
    _, model = apply(FoldTiedHead(), TIED)
    clean(model)
    assert kinds(model) == {"Gather": 1, "MatMulNT": 1}
    assert list(model.graph.initializers) == ["w"]


def test_computes_the_same() -> None:
    _, model = apply(FoldTiedHead(), TIED)
    assert_same(model, TIED, {"x": normal(2, 5, 2), "i": np.arange(10).reshape(2, 5) % 3})


def test_promises_that_no_weight_is_transposed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FoldTiedHead, "rewrite", lambda *_: None)
    with pytest.raises(PostconditionError, match="transposes a weight"):
        FoldTiedHead()(parse(TIED))
