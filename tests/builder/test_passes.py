"""Each pass: how often it matches, that what it rewrites computes the same, and that its conditions hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx_ir.passes import PostconditionError, PreconditionError
from specbuild.builder.export import export
from specbuild.builder.passes import clean, run_portable
from specbuild.builder.passes.gather_logits import GatherLogits
from specbuild.builder.passes.pattern import FusionPass
from specbuild.builder.passes.static_reshape import StaticReshape
from specbuild.builder.passes.swiglu import FuseSwiGLU

HEADER = '<ir_version: 10, opset_import: ["" : 23]>'
RESHAPE = """g (float[B, N, 12] x) => (float[B, N, 3, 4] y) {
    s = Shape <end = 2> (x)
    t = Constant <value_ints = [3, 4]> ()
    shape = Concat <axis = 0> (s, t)
    y = Reshape (x, shape)
}"""
SAME = RESHAPE.replace("[3, 4]>", "[12]>").replace("float[B, N, 3, 4] y", "float[B, N, 12] y")
MERGE = """g (float[B, N, 12] x) => (float[M, 12] y) {
    t = Constant <value_ints = [12]> ()
    minus = Constant <value_ints = [-1]> ()
    shape = Concat <axis = 0> (minus, t)
    y = Reshape (x, shape)
}"""
GATHER = """g (float[B, N, 4] x, int64[L] logit_nodes) => (float[B, L, 4] y) {
    one = Constant <value_ints = [-1]> ()
    a = Transpose <perm = [1, 0, 2]> (x)
    i = Unsqueeze (logit_nodes, one)
    b = GatherND (a, i)
    y = Transpose <perm = [1, 0, 2]> (b)
}"""
SWIGLU = """g (float[B, N, 4] x, float[B, N, 4] u) => (float[B, N, 4] y) {
    s = Sigmoid (x)
    silu = Mul (x, s)
    y = Mul (silu, u)
}"""
GLU = SWIGLU.replace("Mul (x, s)", "Mul (u, s)")  # a gate without its own factor
SHARED = SWIGLU.replace("=> (float[B, N, 4] y)", "=> (float[B, N, 4] y, float[B, N, 4] silu)")


def parse(text: str) -> ir.Model:
    return ir.from_onnx_text(HEADER + text)


def kinds(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def apply(fusion: FusionPass, text: str) -> tuple[int, ir.Model]:
    model = parse(text)
    result = fusion(model)
    assert result.modified == (fusion.matched > 0)
    return fusion.matched, model


def run(model: ir.Model, path: Path, feeds: dict[str, Any]) -> np.ndarray:
    ir.save(model, path)
    (output, *_) = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, feeds)
    return np.asarray(output)


@pytest.mark.parametrize("layers", [1, 3])
def test_matches_on_an_exported_graph(make_model: Callable[..., Any], layers: int) -> None:
    graph = export(make_model(num_hidden_layers=layers), 40)
    assert run_portable(graph) == {"StaticReshape": 4 * layers, "GatherLogits": 1, "FuseSwiGLU": layers}
    found = kinds(graph)
    assert (found["SwiGLU"], found["Sigmoid"], found["GatherND"], found["Shape"]) == (layers, 0, 0, 0)
    assert (found["TreeAttention"], found["RMSNormalization"]) == (layers, 2 * layers + 1)
    assert run_portable(graph) == {"StaticReshape": 0, "GatherLogits": 0, "FuseSwiGLU": 0}


@pytest.mark.parametrize(
    ("fusion", "text", "matched"),
    [
        (StaticReshape, RESHAPE, 1),
        (StaticReshape, SAME, 1),
        (StaticReshape, MERGE, 0),
        (StaticReshape, SWIGLU, 0),
        (GatherLogits, GATHER, 1),
        (FuseSwiGLU, SWIGLU, 1),
        (FuseSwiGLU, SWIGLU.replace("(x, s)", "(s, x)").replace("(silu, u)", "(u, silu)"), 1),
        (FuseSwiGLU, GLU, 0),
        (FuseSwiGLU, SHARED.replace("Mul (silu, u)", "Add (silu, u)"), 0),
        (FuseSwiGLU, GATHER, 0),
        (FuseSwiGLU, RESHAPE, 0),
    ],
)
def test_matches(fusion: type[FusionPass], text: str, matched: int) -> None:
    assert apply(fusion(), text)[0] == matched


def test_a_graph_without_the_pattern_is_left_alone() -> None:
    for fusion, text in ((StaticReshape(), MERGE), (FuseSwiGLU(), GLU)):
        _, model = apply(fusion, text)
        assert kinds(model) == kinds(parse(text))


def test_static_reshape_computes_the_same(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(2, 5, 12)).astype(np.float32)
    for text in (RESHAPE, SAME):
        _, model = apply(StaticReshape(), text)
        clean(model)
        assert kinds(model) == ({"Reshape": 1} if text is RESHAPE else {})
        if text is RESHAPE:
            before = run(parse(text), tmp_path / "before.onnx", {"x": x})
            np.testing.assert_array_equal(run(model, tmp_path / "after.onnx", {"x": x}), before)


def test_static_reshape_holds_on_two_uses_of_one_shape() -> None:
    text = RESHAPE.replace("float[B, N, 3, 4] y)", "float[B, N, 3, 4] y, float[B, N, 3, 4] z)")
    matched, model = apply(StaticReshape(), text.replace("}", "    z = Reshape (x, shape)\n}"))
    clean(model)
    assert (matched, kinds(model), len(model.graph.initializers)) == (2, {"Reshape": 2}, 1)


def test_gather_logits_computes_the_same(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(2, 5, 4)).astype(np.float32)
    feeds = {"x": x, "logit_nodes": np.array([4, 0, 2])}
    _, model = apply(GatherLogits(), GATHER)
    clean(model)
    assert kinds(model) == {"Gather": 1}
    np.testing.assert_array_equal(run(model, tmp_path / "after.onnx", feeds), x[:, [4, 0, 2]])
    np.testing.assert_array_equal(run(parse(GATHER), tmp_path / "before.onnx", feeds), x[:, [4, 0, 2]])


def test_gather_logits_needs_its_input() -> None:
    with pytest.raises(PreconditionError, match="logit_nodes"):
        GatherLogits()(parse(SWIGLU))


def test_gather_logits_promises_one_gather() -> None:
    other_axes = GATHER.replace("[1, 0, 2]> (b)", "[0, 1, 2]> (b)")
    with pytest.raises(PostconditionError, match="logit_nodes"):
        GatherLogits()(parse(other_axes))
    used_twice = GATHER.replace("=> (", "=> (int64[L] same, ").replace("}", "    same = Identity (logit_nodes)\n}")
    with pytest.raises(PostconditionError, match="logit_nodes"):
        GatherLogits()(parse(used_twice))


def test_static_reshape_promises_no_computed_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StaticReshape, "rewrite", lambda self, graph, node: False)
    with pytest.raises(PostconditionError, match="shape"):
        StaticReshape()(parse(RESHAPE))


def test_clean_removes_what_nothing_uses() -> None:
    model = parse(SWIGLU.replace("s = Sigmoid (x)", "s = Sigmoid (x)\n    unused = Neg (x)"))
    clean(model)
    assert kinds(model) == {"Sigmoid": 1, "Mul": 2}


def test_swiglu_keeps_gate_and_up_apart() -> None:
    _, model = apply(FuseSwiGLU(), SWIGLU)
    clean(model)
    (node,) = model.graph
    assert [value.name for value in node.inputs if value] == ["x", "u"]
    assert (node.domain, node.outputs[0].name) == ("specbuild", "y")
