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

from specbuild.builder.frontend.attention_layout import probe
from specbuild.builder.frontend.export import export
from specbuild.builder.passes import PORTABLE, census, clean, run_portable
from specbuild.builder.passes.gate_up import FuseGateUp
from specbuild.builder.passes.gather_logits import GatherLogits
from specbuild.builder.passes.gemm import SplitGemm
from specbuild.builder.passes.pattern import FusionPass
from specbuild.builder.passes.qkv import FuseQKV
from specbuild.builder.passes.residual_norm import FuseResidualNorm
from specbuild.builder.passes.rms_norm import FuseRMSNorm
from specbuild.builder.passes.rotary import FuseRotary
from specbuild.builder.passes.static_reshape import StaticReshape
from specbuild.builder.passes.swiglu import FuseSwiGLU
from specbuild.builder.passes.tied_head import FoldTiedHead

HEADER = '<ir_version: 10, opset_import: ["" : 23, "specbuild" : 1]>'
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
BARE = NORM.replace("y = Mul (w, normal)", "y = Neg (normal)")  # no weight
ROTARY = """g (float[B, 2, N, 4] q, float[B, 1, N, 4] k, float[B, 1, N, 4] v, float[B, 1, S, 4] pk,
    float[B, 1, S, 4] pv, int64[B, N] position_ids, int32[B, M] parents, int32[B] cache_len, int32[B] tree_offset)
    => (float[B, N, 8] y, float[B, 1, S, 4] present_key, float[B, 1, S, 4] present_value)
    <float[3, 2] cos = {1, 0, 1, 0, 1, 0}, float[3, 2] sin = {0, 1, 0, 1, 0, 1}> {
    c = Gather (cos, position_ids)
    s = Gather (sin, position_ids)
    rq = RotaryEmbedding (q, c, s)
    rk = RotaryEmbedding (k, c, s)
    y, present_key, present_value = specbuild.TreeAttention <scale = 0.5, window = 3> (
        rq, rk, v, pk, pv, position_ids, parents, cache_len, tree_offset)
}"""
ONLY_QUERY = ROTARY.replace("rk = RotaryEmbedding (k, c, s)", "rk = Identity (k)")
INTERLEAVED = ROTARY.replace("RotaryEmbedding (", "RotaryEmbedding <interleaved = 1> (")
WEIGHTS = """<float[2, 2] a = {1, 2, 3, 4}, float[2, 1] b = {5, 6}, float[2, 1] c = {7, 8},
    float[2] d = {9, 10}, float[1] e = {11}>"""
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
RESIDUAL = """g (float[B, N, 4] x, float[B, N, 4] u) => (float[B, N, 4] logits, float[B, N, 4] sum)
    <float[4] w = {1, 2, 3, 4}> {
    sum = Add (x, u)
    logits = RMSNormalization <axis = -1, epsilon = 0.25> (sum, w)
}"""
BIASED = RESIDUAL.replace("Add (x, u)", "Add (x, w)")
GEMM = """g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] a = {1, 2, 3, 4}, float[2] d = {9, 10}> {
    y = Gemm (x, a, d)
}"""
TIED = """g (float[B, N, 2] x, int64[B, N] i) => (float[B, N, 3] logits, float[B, N, 2] rows)
    <float[3, 2] w = {1, 2, 3, 4, 5, 6}> {
    rows = Gather (w, i)
    t = Transpose <perm = [1, 0]> (w)
    logits = MatMul (x, t)
}"""
COMPUTED = TIED.replace("Transpose <perm = [1, 0]> (w)", "Transpose <perm = [0, 2, 1]> (x)").replace(
    "[B, N, 3]", "[B, N, N]"
)


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
    model = make_model(num_hidden_layers=layers)
    graph = export(model, probe(model.config, 40), 40, 40)
    assert census(graph)["ReduceMean"] == 2 * layers + 1
    assert run_portable(graph) == {
        "StaticReshape": 4 * layers,
        "GatherLogits": 1,
        "SplitGemm": 0,
        "FuseRMSNorm": 2 * layers + 1,
        "FuseRotary": layers,
        "FuseSwiGLU": layers,
        "FuseQKV": layers,
        "FuseGateUp": layers,
        "FuseResidualNorm": 2 * layers,
        "FoldTiedHead": 0,
    }
    assert census(graph) == {
        "AddRMSNorm": 2 * layers,
        "Gather": 2,
        "MatMul": 4 * layers + 1,
        "RMSNormalization": 1,
        "Reshape": 4 * layers,
        "Split": 2 * layers,
        "SwiGLU": layers,
        "Transpose": 3 * layers,
        "TreeAttention": layers,
    }
    assert not any(run_portable(graph).values())


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
        (FuseRMSNorm, NORM, 1),
        (FuseRMSNorm, NORM.replace("(w, normal)", "(normal, w)"), 1),
        (FuseRMSNorm, BARE, 0),
        (FuseRotary, ROTARY, 1),
        (FuseRotary, ONLY_QUERY, 0),
        (FuseRotary, INTERLEAVED, 0),
        (FuseQKV, QKV, 1),
        (FuseQKV, QKV_BIASES, 1),
        (FuseQKV, OTHER_INPUT, 0),
        (FuseGateUp, GATE_UP, 1),
        (FuseGateUp, GATE_UP_BIASES, 1),
        (FuseGateUp, ONE_BIAS, 1),
        (FuseGateUp, SQUARED, 0),
        (FuseResidualNorm, RESIDUAL, 1),
        (FuseResidualNorm, BIASED, 0),
        (FoldTiedHead, TIED, 1),
        (FoldTiedHead, COMPUTED, 0),
        (SplitGemm, GEMM, 1),
        (SplitGemm, GEMM.replace("(x, a, d)", "(x, a)"), 1),
        (SplitGemm, GEMM.replace("Gemm (", "Gemm <transB = 1> ("), 1),
        (SplitGemm, GEMM.replace("Gemm (", "Gemm <alpha = 2.0> ("), 0),
        (SplitGemm, GEMM.replace("Gemm (", "Gemm <transA = 1> ("), 0),
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
    monkeypatch.setattr(StaticReshape, "rewrite", lambda *_: None)
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


@pytest.mark.parametrize("text", [NORM, NORM.replace("(w, normal)", "(normal, w)")])
def test_rms_norm_computes_the_same(tmp_path: Path, text: str) -> None:
    x = np.random.default_rng(0).normal(size=(2, 5, 4)).astype(np.float32)
    _, model = apply(FuseRMSNorm(), text)
    clean(model)
    assert kinds(model) == {"RMSNormalization": 1}
    before, after = (run(m, tmp_path / "graph.onnx", {"x": x}) for m in (parse(text), model))
    np.testing.assert_allclose(after, before, rtol=1e-6)


@pytest.mark.parametrize("text", [GATE_UP, GATE_UP_BIASES, ONE_BIAS])
def test_gate_and_up_compute_the_same(tmp_path: Path, text: str) -> None:
    x = np.random.default_rng(0).normal(size=(2, 5, 2)).astype(np.float32)
    _, model = apply(FuseGateUp(), text)
    clean(model)
    assert (kinds(model)["MatMul"], kinds(model)["Split"]) == (1, 1)
    before, after = (run(m, tmp_path / "graph.onnx", {"x": x}) for m in (parse(text), model))
    np.testing.assert_allclose(after, before, rtol=1e-6)


@pytest.mark.parametrize(("text", "adds"), [(QKV, 0), (QKV_BIASES, 2)])
def test_qkv_keeps_order_and_biases(text: str, adds: int) -> None:
    """Biases that not every product has stay where they are."""
    _, model = apply(FuseQKV(), text)
    clean(model)
    (product,) = (node for node in model.graph if node.op_type == "MatMul")
    (attention,) = (node for node in model.graph if node.op_type == "TreeAttention")
    weight = product.inputs[1].const_value  # type: ignore[union-attr]
    np.testing.assert_array_equal(weight.numpy(), [[1, 2, 5, 7], [3, 4, 6, 8]])  # type: ignore[union-attr]
    assert kinds(model)["Add"] == adds
    assert attention.inputs[2].producer().op_type == "Split"  # type: ignore[union-attr]


def test_a_gemm_computes_the_same(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32)
    _, model = apply(SplitGemm(), GEMM)
    assert kinds(model) == {"MatMul": 1, "Add": 1}
    before, after = (run(m, tmp_path / "graph.onnx", {"x": x}) for m in (parse(GEMM), model))
    np.testing.assert_allclose(after, before, rtol=1e-6)


def test_a_bias_that_is_broadcast_stays_where_it_is(tmp_path: Path) -> None:
    wide = GATE_UP_BIASES.replace("[2, 1] b = {5, 6}", "[2, 2] b = {5, 6, 7, 8}").replace(
        "[2, 1] c = {7, 8}", "[2, 2] c = {1, 2, 3, 4}"
    )
    text = wide.replace("float[B, N, 1] y", "float[B, N, 2] y")
    x = np.random.default_rng(0).normal(size=(2, 5, 2)).astype(np.float32)
    matched, model = apply(FuseGateUp(), text)
    before, after = (run(m, tmp_path / "graph.onnx", {"x": x}) for m in (parse(text), model))
    assert matched == 1
    np.testing.assert_allclose(after, before, rtol=1e-6)


def test_layers_that_share_their_weights(tmp_path: Path) -> None:
    text = GATE_UP.replace(
        "y = Mul (active, up)",
        """z = Mul (active, up)
    two = Concat <axis = -1> (z, z)
    gate2 = MatMul (two, b)
    up2 = MatMul (two, c)
    active2 = Gelu (gate2)
    y = Mul (active2, up2)""",
    )
    x = np.random.default_rng(0).normal(size=(2, 5, 2)).astype(np.float32)
    matched, model = apply(FuseGateUp(), text)
    before, after = (run(m, tmp_path / "graph.onnx", {"x": x}) for m in (parse(text), model))
    assert matched == 2
    np.testing.assert_allclose(after, before, rtol=1e-5)


def test_rotary_hands_over_the_tables() -> None:
    _, model = apply(FuseRotary(), ROTARY)
    clean(model)
    (node,) = model.graph
    names = [value.name for value in node.inputs if value]
    assert names == ["q", "k", "v", "pk", "pv", "position_ids", "parents", "cache_len", "tree_offset", "cos", "sin"]
    assert (node.attributes["scale"].as_float(), node.attributes["window"].as_int()) == (0.5, 3)
    assert [value.name for value in model.graph.outputs] == ["y", "present_key", "present_value"]


def test_residual_norm_hands_the_sum_on() -> None:
    _, model = apply(FuseResidualNorm(), RESIDUAL)
    (node,) = model.graph
    assert [value.name for value in node.inputs if value] == ["x", "u", "w"]
    assert [value.name for value in node.outputs] == ["logits", "sum"]
    assert node.attributes["epsilon"].as_float() == 0.25


def test_a_tied_head_is_stored_once() -> None:
    _, model = apply(FoldTiedHead(), TIED)
    clean(model)
    assert kinds(model) == {"Gather": 1, "MatMulNT": 1}
    assert list(model.graph.initializers) == ["w"]


@pytest.mark.parametrize(
    ("fusion", "text"),
    [
        (FuseRMSNorm, NORM),
        (FuseRotary, SWIGLU),
        (FuseQKV, SWIGLU),
        (FuseResidualNorm, SWIGLU),
    ],
)
def test_preconditions(fusion: type[FusionPass], text: str) -> None:
    model = parse(text)
    if fusion is FuseRMSNorm:
        model.graph.opset_imports[""] = 22
    with pytest.raises(PreconditionError):
        fusion()(model)


@pytest.mark.parametrize(
    ("fusion", "text"),
    [
        (FuseRotary, ROTARY),
        (FuseQKV, QKV),
        (FuseGateUp, GATE_UP),
        (FuseResidualNorm, RESIDUAL),
        (FoldTiedHead, TIED),
        (SplitGemm, GEMM),
    ],
)
def test_postconditions(fusion: type[FusionPass], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "rewrite", lambda *_: None)
    with pytest.raises(PostconditionError):
        fusion()(parse(text))


def test_rms_norm_promises_that_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbuild.builder.passes.rms_norm.onnx_fusions.fuse", lambda model: {})
    with pytest.raises(PostconditionError):
        FuseRMSNorm()(parse(NORM))


def test_every_pass_is_run() -> None:
    assert len({kind.__name__ for kind in PORTABLE}) == 10
