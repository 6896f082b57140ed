"""The graph around the TensorRT plugin: transformers' logits for ragged batches of trees, with the plugin in NumPy.

The plugin is `plugin_model.TreeAttention`.
"""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from plugin_lowering import (
    CAPACITY,
    MODELS,
    NODES,
    PAGE,
    PARTIAL,
    PROMPTS,
    SEEN,
    Session,
    fused,
    make,
)
from small_models import branching, reference

from specbuild.builder.frontend.layer_by_layer import LayeredModel
from specbuild.builder.lower.plugin import DTYPES, lower
from specbuild.builder.quantize.fp8_caches import cached_logits, calibrate
from specbuild.runtime.errors import OptionError
from specbuild.runtime.speculation.tree import Tree


@pytest.fixture(scope="module")
def llama():
    """A model and its portable graph."""
    model = make("llama")
    return model, fused(model)


def check(model, graph, tolerance, scales=None):
    """Prompts of two lengths, then two trees in two steps: every node's logits are its path's, over the same caches."""

    def wanted(tokens):
        return (
            reference(model, tokens) if scales is None else cached_logits(LayeredModel.of(model), [tokens], scales)[0]
        )

    session = Session(graph)
    for rows, prompt in zip(session.step([Tree.chain(p) for p in PROMPTS], 0, CAPACITY), PROMPTS, strict=True):
        np.testing.assert_allclose(rows, wanted(prompt), rtol=tolerance, atol=tolerance)
    session.lengths = [len(prompt) for prompt in PROMPTS]
    trees = [branching(0, NODES), branching(1, NODES - 4)]
    parts = [session.step(trees, *bounds) for bounds in ((0, SEEN), (SEEN, NODES))]
    for prompt, tree, *rows in zip(PROMPTS, trees, *parts, strict=True):
        for node, row in enumerate(np.concatenate(rows)):
            expected = wanted([*prompt, tree.tokens[0], *tree.path(node)])[-1]
            np.testing.assert_allclose(row, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.soak(
    only=("mqa, biases, llama3, tied", "norms of heads", "a rotated half", "a layer without rotation", "soft-cap")
)
@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_transformers(name):
    model_type, fields, whole = MODELS[name]
    model = make(model_type, **fields)
    portable = fused(model)
    onnx.checker.check_model(ir.to_proto(lower(portable, "fp16", CAPACITY)), full_check=True)
    graph = lower(portable, "fp32", CAPACITY)
    check(model, graph, 1e-4)
    given = [n.attributes["inputs"].as_string() for n in graph.graph if n.op_type == "TreeAttention"]
    assert [names.startswith("qkv,past_key,") for names in given] == [whole] * 2
    assert ["cos,sin" in names for names in given] == [True, name != "a layer without rotation"]


@pytest.mark.slow(only=("gqa",))
@pytest.mark.nightly(but=("gqa",))
@pytest.mark.parametrize("name", ["gqa", "norms of heads", "window", "soft-cap"])
def test_logits_over_fp8_caches(name):
    """What PyTorch computes over keys and values that were rounded by the same scales."""
    model_type, fields, _ = MODELS[name]
    model = make(model_type, **fields)
    scales = calibrate(LayeredModel.of(model), PROMPTS)
    graph = lower(fused(model), "fp32", CAPACITY, scales)
    check(model, graph, 1e-4, scales)
    with pytest.raises(AssertionError):
        check(model, graph, 1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [False, True], ids=["own type", "fp8"])
def test_logits_over_paged_caches(llama, fp8):
    model, portable = llama
    scales = calibrate(LayeredModel.of(model), PROMPTS) if fp8 else None
    graph = lower(portable, "fp32", CAPACITY, scales, PAGE)
    check(model, graph, 1e-4, scales)


@pytest.mark.nightly
def test_a_product_in_another_order_is_not_taken_whole():
    portable = fused(make("llama", num_key_value_heads=4, num_hidden_layers=1))
    (node,) = (node for node in portable.graph if node.op_type == "TreeAttention")
    query, key = node.inputs[:2]
    node.replace_input_with(0, key)
    node.replace_input_with(1, query)
    ((names, _),) = attentions(lower(portable, "fp16", CAPACITY))
    assert names[:4] == ["query", "key", "value", "past_key"]


@pytest.mark.slow(only=("head size",))
@pytest.mark.nightly(but=("head size",))
@pytest.mark.parametrize(
    ("model_type", "fields", "reason"),
    [
        pytest.param("llama", {"head_dim": 16}, "head size 16: the plugin's attention has 64, 80", id="head size"),
        ("phi3", {"rope_parameters": PARTIAL, "head_dim": 80}, "40 rotated dimensions"),
        ("gpt2", {"hidden_size": 128, "num_attention_heads": 2}, "the model's Gather wants them"),
    ],
)
def test_what_the_kernel_has_not(model_type, fields, reason):
    portable = fused(make(model_type, num_hidden_layers=1, **fields))
    with pytest.raises(OptionError, match=reason + ".*: build with --attention native$"):
        lower(portable, "fp16", CAPACITY)


def attentions(model):
    """Each attention and the names of its inputs."""
    nodes = [node for node in model.graph if node.op_type == "TreeAttention"]
    return [(node.attributes["inputs"].as_string().split(","), node) for node in nodes]


@pytest.mark.slow
@pytest.mark.parametrize("precision", DTYPES)
def test_numbers_are_of_the_type_that_is_computed_in(llama, precision):
    """But for tables, logits, and what counts."""
    model, dtype = lower(llama[1], precision, CAPACITY), DTYPES[precision]
    for value in model.graph.inputs:
        assert value.dtype == (dtype if str(value.name).startswith("past") else ir.DataType.INT32)
    assert [v.dtype for v in model.graph.outputs] == [ir.DataType.FLOAT, *[dtype] * 4]
    tables = {v for _, node in attentions(model) for v in node.inputs if "rotary" in v.name}
    assert {v.dtype for v in tables} == {ir.DataType.FLOAT}
    assert {v.dtype for v in {*model.graph.initializers.values()} - tables} == {dtype, ir.DataType.INT64}
