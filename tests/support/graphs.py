"""Graphs written as text, what a pass makes of them, and what ONNX Runtime computes by them."""

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

HEADER = '<ir_version: 10, opset_import: ["" : 23, "specbuild" : 1]>'
RESHAPE = """g (float[B, N, 12] x) => (float[B, N, 3, 4] y) {
    s = Shape <end = 2> (x)
    t = Constant <value_ints = [3, 4]> ()
    shape = Concat <axis = 0> (s, t)
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
WEIGHTS = """<float[2, 2] a = {1, 2, 3, 4}, float[2, 1] b = {5, 6}, float[2, 1] c = {7, 8},
    float[2] d = {9, 10}, float[1] e = {11}>"""
MEANINGS = (  # of the operators that passes make, in standard ones
    "SwiGLU (g, u) => (y) { s = Sigmoid (g)  silu = Mul (g, s)  y = Mul (silu, u) }",
    "MatMulNT (x, w) => (y) { t = Transpose <perm = [1, 0]> (w)  y = MatMul (x, t) }",
    """AddRMSNorm <epsilon> (x, y, w) => (norm, sum) {
        sum = Add (x, y)
        norm = RMSNormalization <axis = -1, epsilon: float = @epsilon> (sum, w)
    }""",
)


def parse(text):
    return ir.from_onnx_text(HEADER + text)


def kinds(model):
    return Counter(node.op_type for node in model.graph)


def apply(fusion, text):
    """How often a pass matches in a graph, and the graph afterwards."""
    model = parse(text)
    result = fusion(model)
    assert result.modified == (fusion.matched > 0)
    return fusion.matched, model


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def run(model, feeds, *meanings):
    """All outputs; `meanings`: what other operators of specbuild compute, as functions in text."""
    proto = ir.to_proto(model)
    for text in (*MEANINGS, *meanings):
        proto.functions.append(onnx.parser.parse_function(f'<opset_import: ["" : 23], domain: "specbuild"> {text}'))
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return [np.asarray(output) for output in session.run(None, feeds)]


def assert_same(model, text, feeds, *meanings, rtol=1e-6):
    """A graph has the outputs of the one it was made of, and their names; its nodes are in order."""
    nodes = list(model.graph)
    makers = [(at, value.producer()) for at, node in enumerate(nodes) for value in node.inputs if value is not None]
    assert all(maker is None or maker in nodes[:at] for at, maker in makers)
    before = parse(text)
    assert [value.name for value in model.graph.outputs] == [value.name for value in before.graph.outputs]
    pairs = zip(run(model, feeds, *meanings), run(before, feeds, *meanings), strict=True)
    for mine, expected in pairs:
        np.testing.assert_allclose(mine, expected, rtol=rtol)
