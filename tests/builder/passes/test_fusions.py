"""Each pass: what it matches, what it leaves of a graph, and that the graph computes the same afterwards."""

import numpy as np
import onnx_ir as ir
import pytest
from graphs import GATHER, RESHAPE, SWIGLU, WEIGHTS, apply, assert_same, kinds, normal, parse
from onnx_ir.passes import PostconditionError, PreconditionError

from specbuild.builder.passes import clean
from specbuild.builder.passes.gate_up import FuseGateUp
from specbuild.builder.passes.gather_logits import GatherLogits
from specbuild.builder.passes.gemm import SplitGemm
from specbuild.builder.passes.qkv import FuseQKV
from specbuild.builder.passes.residual_norm import FuseResidualNorm
from specbuild.builder.passes.rms_norm import FuseRMSNorm
from specbuild.builder.passes.rotary import FuseRotary
from specbuild.builder.passes.row_sum import RowSum
from specbuild.builder.passes.static_reshape import StaticReshape
from specbuild.builder.passes.swiglu import FuseSwiGLU
from specbuild.builder.passes.tied_head import FoldTiedHead

SIZES = {"B": 2, "N": 5, "L": 3}
ATTENTION = "TreeAttention (q, k, v) => (y, pk, pv) { y = Identity (q)  pk = Identity (k)  pv = Identity (v) }"

GATE_UP = f"""g (float[B, N, 2] x) => (float[B, N, 1] y) {WEIGHTS} {{
    gate = MatMul (x, b)
    up = MatMul (x, c)
    active = Gelu (gate)
    y = Mul (active, up)
}}"""
ONE_BIAS = GATE_UP.replace("gate = MatMul (x, b)", "g0 = MatMul (x, b)  gate = Add (g0, e)")
BIASES = ONE_BIAS.replace("up = MatMul (x, c)", "u0 = MatMul (x, c)  up = Add (u0, e)")
BROADCAST = (
    BIASES.replace("[2, 1] b = {5, 6}", "[2, 2] b = {5, 6, 7, 8}")
    .replace("[2, 1] c = {7, 8}", "[2, 2] c = {1, 2, 3, 4}")
    .replace("float[B, N, 1] y", "float[B, N, 2] y")
)
UP_FIRST = GATE_UP.replace("Mul (active, up)", "Mul (up, active)")
GATED = GATE_UP.replace("active = Gelu (gate)\n    y = Mul (active, up)", "y = specbuild.SwiGLU (gate, up)")
SQUARED = GATE_UP.replace("y = Mul (active, up)", "y = Mul (active, gate)")

GEMM = """g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] a = {1, 2, 3, 4}, float[2] d = {9, 10}> {
    y = Gemm (x, a, d)
}"""

QKV = f"""g (float[B, N, 2] x) => (float[B, N, 2] y, float[B, N, 1] present_key, float[B, N, 1] present_value)
    {WEIGHTS} {{
    q = MatMul (x, a)
    k = MatMul (x, b)
    v = MatMul (x, c)
    y, present_key, present_value = specbuild.TreeAttention (q, k, v)
}}"""
TWO_BIASES = QKV.replace("q = MatMul (x, a)", "p = MatMul (x, a)  q = Add (p, d)").replace(
    "k = MatMul (x, b)", "m = MatMul (x, b)  k = Add (e, m)"
)
THREE_BIASES = TWO_BIASES.replace("v = MatMul (x, c)", "n = MatMul (x, c)  v = Add (n, e)")

RESIDUAL = """g (float[B, N, 4] x, float[B, N, 4] u) => (float[B, N, 4] logits, float[B, N, 4] sum)
    <float[4] w = {1, 2, 3, 4}> {
    sum = Add (x, u)
    logits = RMSNormalization <axis = -1, epsilon = 0.25> (sum, w)
}"""
TWO_NORMS = RESIDUAL.replace("=> (", "=> (float[B, N, 4] other, ").replace(
    "\n}", "\n    other = RMSNormalization <axis = -1, epsilon = 0.5> (sum, w)\n}"
)
OTHER_AXIS = RESIDUAL.replace("axis = -1", "axis = 1").replace("float[4] w = {1", "float[1, 4] w = {1")

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
OTHER_POSITIONS = ROTARY.replace("position_ids, int32", "position_ids, int64[B, N] other, int32").replace(
    "(cos, position_ids)", "(cos, other)"
)

SUMS = """g (float[N, 6] x) => (float[N, 1] y) <int64[1] axes = {-1}, int64[1] last = {1}> {
    a = ReduceSum (x, axes)
    b = ReduceSum <keepdims = 1> (x, last)
    y = Add (a, b)
}"""

SAME_SHAPE = RESHAPE.replace("[3, 4]>", "[12]>").replace("float[B, N, 3, 4] y", "float[B, N, 12] y")
FLAT = """g (float[B, N, 12] x) => (float[M, 1, 12] y) {
    t = Constant <value_ints = [1, 12]> ()
    minus = Constant <value_ints = [-1]> ()
    shape = Concat <axis = 0> (minus, t)
    y = Reshape (x, shape)
}"""

TURNED = SWIGLU.replace("(x, s)", "(s, x)").replace("(silu, u)", "(u, silu)")
SHARED = SWIGLU.replace("=> (float[B, N, 4] y)", "=> (float[B, N, 4] y, float[B, N, 4] silu)")

TIED = """g (float[B, N, 2] x, int64[B, N] i) => (float[B, N, 3] logits, float[B, N, 2] rows)
    <float[3, 2] w = {1, 2, 3, 4, 5, 6}> {
    rows = Gather (w, i)
    t = Transpose <perm = [1, 0]> (w)
    logits = MatMul (x, t)
}"""

MERGED = {"MatMul": 1, "Split": 1, "Gelu": 1, "Mul": 1}
FUSED = [
    (FuseGateUp, "plain", GATE_UP, MERGED),
    (FuseGateUp, "biases", BIASES, MERGED | {"Add": 1}),
    (FuseGateUp, "a bias that is broadcast", BROADCAST, MERGED | {"Add": 2}),
    (FuseGateUp, "up first", UP_FIRST, MERGED),
    (FuseGateUp, "swiglu", GATED, {"MatMul": 1, "Split": 1, "SwiGLU": 1}),
    (GatherLogits, "the exporter's form", GATHER, {"Gather": 1}),
    (SplitGemm, "plain", GEMM, {"MatMul": 1, "Add": 1}),
    (SplitGemm, "no bias", GEMM.replace("(x, a, d)", "(x, a)"), {"MatMul": 1}),
    (SplitGemm, "weight turned", GEMM.replace("Gemm (", "Gemm <transB = 1> ("), {"MatMulNT": 1, "Add": 1}),
    (FuseQKV, "plain", QKV, {"MatMul": 1, "Split": 1, "TreeAttention": 1}),
    (FuseQKV, "two biases", TWO_BIASES, {"MatMul": 1, "Split": 1, "TreeAttention": 1, "Add": 2}),
    (FuseQKV, "three biases", THREE_BIASES, {"MatMul": 1, "Split": 1, "TreeAttention": 1, "Add": 1}),
    (FuseResidualNorm, "one norm", RESIDUAL, {"AddRMSNorm": 1}),
    (FuseResidualNorm, "two norms", TWO_NORMS, {"AddRMSNorm": 1, "RMSNormalization": 1}),
    (FuseResidualNorm, "defaults", RESIDUAL.replace("<axis = -1, epsilon = 0.25>", ""), {"AddRMSNorm": 1}),
    (FuseRMSNorm, "plain", NORM, {"RMSNormalization": 1}),
    (FuseRMSNorm, "turned", NORM.replace("(w, normal)", "(normal, w)"), {"RMSNormalization": 1}),
    (StaticReshape, "another shape", RESHAPE, {"Reshape": 1}),
    (StaticReshape, "the same shape", SAME_SHAPE, {"Identity": 1}),  # from an input to an output: both names stay
    (RowSum, "two of one length", SUMS, {"MatMul": 2, "Add": 1}),
    (FuseSwiGLU, "plain", SWIGLU, {"SwiGLU": 1}),
    (FuseSwiGLU, "turned", TURNED, {"SwiGLU": 1}),
    (FuseSwiGLU, "silu is an output", SHARED, {"SwiGLU": 1, "Sigmoid": 1, "Mul": 1}),
    (FoldTiedHead, "tied", TIED, {"Gather": 1, "MatMulNT": 1}),
]  # fmt: skip
LEFT_ALONE = [
    (FuseGateUp, "squared", SQUARED),
    (SplitGemm, "scaled", GEMM.replace("Gemm (", "Gemm <alpha = 2.0> (")),
    (SplitGemm, "input turned", GEMM.replace("Gemm (", "Gemm <transA = 1> (")),
    (FuseQKV, "another input", QKV.replace("k = MatMul (x, b)", "z = Neg (x)  k = MatMul (z, b)")),
    (FuseResidualNorm, "a bias", RESIDUAL.replace("Add (x, u)", "Add (x, w)")),
    (FuseResidualNorm, "another axis", OTHER_AXIS),
    (FuseResidualNorm, "no names", RESIDUAL.replace("[B, N, 4] x, float[B, N, 4] u", "[?, ?, 4] x, float[?, ?, 4] u")),
    (FuseRMSNorm, "no weight", NORM.replace("y = Mul (w, normal)", "y = Neg (normal)")),
    (FuseRotary, "only the query", ROTARY.replace("rk = RotaryEmbedding (k, c, s)", "rk = Identity (k)")),
    (FuseRotary, "interleaved", ROTARY.replace("RotaryEmbedding (", "RotaryEmbedding <interleaved = 1> (")),
    (FuseRotary, "other positions", OTHER_POSITIONS),
    (RowSum, "whole vectors", SUMS.replace("6]", "16]")),
    (StaticReshape, "batch and nodes merged", FLAT),
    (FuseSwiGLU, "a gate without its own factor", SWIGLU.replace("Mul (x, s)", "Mul (u, s)")),
    (FuseSwiGLU, "a sum", SHARED.replace("Mul (silu, u)", "Add (silu, u)")),
    (FuseSwiGLU, "read twice", SWIGLU.replace("y = Mul (silu, u)", "y = Mul (silu, silu)")),
    (FoldTiedHead, "computed", TIED.replace("<perm = [1, 0]> (w)", "<perm = [0, 2, 1]> (x)").replace("N, 3]", "N, N]")),
]  # fmt: skip


def feeds(text):
    """Any numbers for each input of a graph."""
    found = {}
    for value in parse(text).graph.inputs:
        assert value.shape is not None
        shape = [dim if isinstance(dim, int) else SIZES[str(dim)] for dim in value.shape]
        count = np.arange(np.prod(shape)).reshape(shape)
        found[str(value.name)] = normal(*shape) if value.dtype == ir.DataType.FLOAT else count % 3
    return found


@pytest.mark.parametrize(
    ("fusion", "text", "left"), [pytest.param(f, t, left, id=f"{f.__name__}: {name}") for f, name, t, left in FUSED]
)
def test_a_graph_computes_the_same_in_fewer_nodes(fusion, text, left):
    matched, model = apply(fusion(), text)
    assert matched == (2 if text is SUMS else 1)
    clean(model)
    assert kinds(model) == left
    assert_same(model, text, feeds(text), ATTENTION)


@pytest.mark.parametrize(
    ("fusion", "text"), [pytest.param(f, text, id=f"{f.__name__}: {name}") for f, name, text in LEFT_ALONE]
)
def test_what_only_looks_alike_is_left_alone(fusion, text):
    matched, model = apply(fusion(), text)
    assert (matched, kinds(model)) == (0, kinds(parse(text)))


def test_attention_takes_the_tables_and_rotates_by_itself():
    _, model = apply(FuseRotary(), ROTARY)
    clean(model)
    (node,) = model.graph
    names = [value.name for value in node.inputs if value]
    assert names == ["q", "k", "v", "pk", "pv", "position_ids", "parents", "cache_len", "tree_offset", "cos", "sin"]
    assert (node.attributes["scale"].as_float(), node.attributes["window"].as_int()) == (0.5, 3)


@pytest.mark.parametrize(
    ("fusion", "name"),
    [
        (FuseQKV, "TreeAttention"),
        (FuseResidualNorm, "logits"),
        (FuseRotary, "position_ids"),
        (GatherLogits, "logit"),
    ],
)
def test_what_a_pass_needs_is_named(fusion, name):
    with pytest.raises(PreconditionError, match=name):
        fusion()(parse(SWIGLU))


def test_a_norm_needs_the_opset_that_has_the_operator():
    model = parse(NORM)
    model.graph.opset_imports[""] = 22
    with pytest.raises(PreconditionError, match="opset 23"):
        FuseRMSNorm()(model)


@pytest.mark.parametrize(
    ("fusion", "text", "message"),
    [
        (FuseRMSNorm, NORM.replace("two = {2}", "two = {3}"), "was not matched"),  # ends as a norm does
        (GatherLogits, GATHER.replace("[1, 0, 2]> (b)", "[0, 1, 2]> (b)"), "logit_nodes"),
        (
            GatherLogits,
            GATHER.replace("=> (", "=> (int64[L] same, ").replace("\n}", "\n    same = Identity (logit_nodes)\n}"),
            "logit_nodes",
        ),
    ],
    ids=["norm", "other axes", "used twice"],
)
def test_what_is_left_undone_is_refused(fusion, text, message):
    with pytest.raises(PostconditionError, match=message):
        fusion()(parse(text))
