"""StaticReshape makes computed shapes constant where batch and nodes are kept, and drops reshapes to the same shape."""

from __future__ import annotations

import pytest
from graphs import RESHAPE, SWIGLU, apply, assert_same, kinds, normal, parse
from onnx_ir.passes import PostconditionError

from specbuild.builder.passes import clean
from specbuild.builder.passes.static_reshape import StaticReshape

SAME = RESHAPE.replace("[3, 4]>", "[12]>").replace("float[B, N, 3, 4] y", "float[B, N, 12] y")
MERGE = """g (float[B, N, 12] x) => (float[M, 12] y) {
    t = Constant <value_ints = [12]> ()
    minus = Constant <value_ints = [-1]> ()
    shape = Concat <axis = 0> (minus, t)
    y = Reshape (x, shape)
}"""
FLAT = MERGE.replace("[12]> ()", "[1, 12]> ()").replace("float[M, 12] y", "float[M, 1, 12] y")


@pytest.mark.parametrize(
    ("text", "matched"),
    [(RESHAPE, 1), (SAME, 1), (MERGE, 0), (FLAT, 0), (SWIGLU, 0)],
    ids=["other", "same", "merged", "flat", "none"],
)
def test_matches_where_batch_and_nodes_are_kept(text: str, matched: int) -> None:
    assert apply(StaticReshape(), text)[0] == matched


def test_a_reshape_that_merges_batch_and_nodes_is_left_alone() -> None:
    _, model = apply(StaticReshape(), MERGE)
    assert kinds(model) == kinds(parse(MERGE))


def test_the_shape_is_constant_and_the_result_the_same() -> None:
    _, model = apply(StaticReshape(), RESHAPE)
    clean(model)
    assert kinds(model) == {"Reshape": 1}
    assert_same(model, RESHAPE, {"x": normal(2, 5, 12)}, rtol=0)


def test_a_reshape_to_the_same_shape_goes() -> None:
    _, model = apply(StaticReshape(), SAME)
    clean(model)
    assert kinds(model) == {"Identity": 1}  # from an input to an output, whose names both stay


def test_two_uses_of_one_shape_share_a_constant() -> None:
    text = RESHAPE.replace("float[B, N, 3, 4] y)", "float[B, N, 3, 4] y, float[B, N, 3, 4] z)")
    text = text.replace("}", "    z = Reshape (x, shape)\n}")
    matched, model = apply(StaticReshape(), text)
    clean(model)
    assert (matched, kinds(model), len(model.graph.initializers)) == (2, {"Reshape": 2}, 1)
    assert_same(model, text, {"x": normal(2, 5, 12)}, rtol=0)


def test_promises_that_no_such_shape_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StaticReshape, "rewrite", lambda *_: None)
    with pytest.raises(PostconditionError, match="still computes its shape"):
        StaticReshape()(parse(RESHAPE))
