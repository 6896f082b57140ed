"""MergeProducts joins weights side by side, once for all who use them, and takes only products it may."""

import onnx_ir as ir
import pytest
from graphs import apply, assert_same, kinds, normal, parse

from specbuild.builder.passes.merge import MergeProducts


class MergePair(MergeProducts):
    operators = frozenset({"Max"})
    through = frozenset({"Add", "Relu"})
    count = 2


PAIR = """g (float[B, N, 2] x) => (float[B, N, 2] y)
    <float[2, 2] a = {1, 2, 3, 4}, float[2, 2] c = {5, 6, 7, 8}, float[2] d = {9, 10}> {
    p = MatMul (x, a)
    left = Relu (p)
    right = MatMul (x, c)
    y = Max (left, right)
}"""
BIASES = PAIR.replace("Relu (p)", "Add (d, p)").replace(
    "right = MatMul (x, c)", "r = MatMul (x, c)  right = Add (r, d)"
)


@pytest.mark.parametrize("text", [PAIR, BIASES], ids=["plain", "biases on either side"])
def test_weights_and_biases_lie_side_by_side(text):
    matched, model = apply(MergePair(), text)
    assert matched == 1
    assert (kinds(model)["MatMul"], kinds(model)["Split"], kinds(model)["Add"]) == (1, 1, int(text is BIASES))
    assert_same(model, text, {"x": normal(2, 5, 2)})


def test_weights_are_not_read_before_what_is_joined_is_written():
    model, read = parse(PAIR), list[str]()
    weight = model.graph.initializers["a"]
    stored = weight.const_value

    def load():
        read.append("a")
        return stored

    weight.const_value = ir.LazyTensor(load, ir.DataType.FLOAT, ir.Shape([2, 2]), name="a")
    MergePair()(model)
    joined = model.graph.initializers["a+c"]
    assert (joined.shape, joined.dtype, read) == ((2, 4), ir.DataType.FLOAT, [])
    assert joined.const_value.numpy().shape == (2, 4)
    assert read


def test_products_of_the_same_weights_share_what_is_joined():
    text = PAIR.replace(
        "y = Max (left, right)",
        """between = Max (left, right)
    p2 = MatMul (between, a)
    right2 = MatMul (between, c)
    y = Max (p2, right2)""",
    )
    matched, model = apply(MergePair(), text)
    assert (matched, kinds(model)["MatMul"], list(model.graph.initializers).count("a+c")) == (2, 2, 1)
    assert_same(model, text, {"x": normal(2, 5, 2)}, rtol=1e-5)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Max (left, right)", "Max (p, left)"),
        ("MatMul (x, c)", "MatMul (p, c)"),
        ("MatMul (x, c)", "Mul (x, d)"),
        ("Relu (p)", "Neg (p)"),
        ("=> (", "=> (float[B, N, 2] right, "),
        ("Max (", "Sum ("),
    ],
    ids=["one twice", "another input", "no product", "another operator between", "an output", "another node"],
)
def test_what_may_not_be_merged_stays(old, new):
    text = PAIR.replace(old, new)
    matched, model = apply(MergePair(), text)
    assert (matched, kinds(model)["Split"]) == (0, 0)
