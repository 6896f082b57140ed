"""FusionPass counts, needs and promises; values are replaced under their names, and constants are made once."""

import numpy as np
import onnx_ir as ir
from graphs import apply, assert_same, kinds, normal, parse

from specbuild.builder.passes.pattern import (
    FusionPass,
    producer,
    renamed,
    replace,
)

TWICE = """g (float[B, N, 4] x) => (float[B, N, 4] y) {
    a = Neg (x)
    b = Neg (a)
    y = Abs (b)
}"""


class DropPairs(FusionPass):
    """Two signs changed in turn change nothing."""

    needs = ("Abs", "x")
    left = "changes a sign back"

    def find(self, node):
        return producer(node.inputs[0], "Neg") if node.op_type == "Neg" else None

    def rewrite(self, graph, node, found):
        value = found.inputs[0]
        assert value is not None
        replace(node.outputs[0], value)
        for dead in (node, found):
            graph.remove(dead, safe=True)


class DropAll(DropPairs):
    """All signs at once."""

    def find(self, node):
        return node.op_type == "Neg"

    def rewrite(self, graph, node, found):
        for dead in [each for each in graph if each.op_type == "Neg"]:
            replace(dead.outputs[0], dead.inputs[0])
            graph.remove(dead, safe=True)


def test_nodes_that_a_rewrite_removed_are_passed_over():
    matched, model = apply(DropAll(), TWICE)
    assert (matched, kinds(model)) == (1, {"Abs": 1})


def test_matches_are_counted():
    four = TWICE.replace("y = Abs (b)", "c = Neg (b)\n    d = Neg (c)\n    y = Abs (d)")
    matched, model = apply(DropPairs(), four)
    assert (matched, kinds(model)) == (2, {"Abs": 1})
    assert_same(model, four, {"x": normal(1, 2, 4)}, rtol=0)


def test_renamed_bytes_of_a_file_take_another_shape(tmp_path):
    array = np.arange(6, dtype=np.float32)
    (tmp_path / "weights").write_bytes(b"before" + array.tobytes())
    stored = ir.ExternalTensor("weights", 6, 24, ir.DataType.FLOAT, shape=ir.Shape([2, 3]), name="w", base_dir=tmp_path)
    again = renamed(stored, "rows", ir.Shape([6]))
    assert (again.name, renamed(stored, "same").shape) == ("rows", (2, 3))
    np.testing.assert_array_equal(again.numpy(), array)


def test_a_graphs_input_keeps_its_name_where_it_becomes_an_output():
    text = TWICE.replace("y = Abs (b)", "y = Identity (x)")
    model = parse(text)
    last = list(model.graph)[-1]
    replace(last.outputs[0], model.graph.inputs[0])
    model.graph.remove(last, safe=True)
    assert [value.name for value in (*model.graph.inputs, *model.graph.outputs)] == ["x", "y"]
    assert_same(model, text, {"x": normal(1, 2, 4)}, rtol=0)


def test_two_outputs_that_become_one_value_keep_their_names():
    text = TWICE.replace("=> (", "=> (float[B, N, 4] z, ").replace("y = Abs (b)", "z = Abs (b)  y = Abs (b)")
    model = parse(text)
    first, second = list(model.graph)[-2:]
    replace(second.outputs[0], first.outputs[0])
    model.graph.remove(second, safe=True)
    assert [value.name for value in model.graph.outputs] == ["z", "y"]
    assert_same(model, text, {"x": normal(1, 2, 4)}, rtol=0)
