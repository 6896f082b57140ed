"""The graph in standard operators: transformers' logits when ONNX Runtime runs it, for ragged batches of trees.

ONNX Runtime's reference implementation of opset 24 on a CPU is slow, and enough to prove the graph.
"""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import small_models
import torch
from small_models import LLAMA3, branching, random_model, reference

from specbuild.builder.lower.standard import DTYPES, lower
from specbuild.builder.passes.pattern import save
from specbuild.runtime.errors import OptionError
from specbuild.runtime.speculation.tree import Tree

CAPACITY, NODES = 40, 9
PROMPTS = [[5, 17, 3, 88, 42, 9, 9, 61], [61, 4, 4]]
VARIANTS = {
    "gqa": {},
    "mqa, biases": {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    "mha, tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "llama3": {"rope_parameters": LLAMA3},
    "odd": {
        "hidden_size": 39,
        "intermediate_size": 53,
        "head_dim": 24,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
    },
}


def fused(model):
    return small_models.fused(model, CAPACITY)


class Session:
    """The lowered graph with its caches, `[B, Hkv, S, D]` per layer; every sequence's rows begin at its own length."""

    def __init__(self, graph, path, window=0):
        shapes = {"Shape", "Size", "Range", "ConstantOfShape"}  # which ONNX Runtime gives the CPU, and a GPU may not
        assert not shapes & {node.op_type for node in graph.graph}
        ir.save(graph, path)
        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        self.window, self.lengths = window, [0] * len(PROMPTS)
        shapes = {each.name: each.shape for each in self.session.get_inputs() if each.name.startswith("past")}
        self.caches = {n: np.zeros((len(PROMPTS), *shape[1:]), dtype=np.float32) for n, shape in shapes.items()}

    def step(self, trees):
        """Logits `[B, N, V]`; padding has a node's worth of anything."""
        batch, nodes = len(trees), max(len(tree) for tree in trees)
        tokens, positions = (np.zeros((batch, nodes), dtype=np.int32) for _ in range(2))
        mask = np.zeros((batch, 1, nodes, CAPACITY), dtype=bool)
        for b, (tree, start) in enumerate(zip(trees, self.lengths, strict=True)):
            count, depths = len(tree), np.array(tree.depths)
            tokens[b, :count], positions[b, :count] = tree.tokens, start + depths
            mask[b, 0, :, 0] = True  # padding sees something
            mask[b, 0, :count, :start], mask[b, 0, :count, start : start + count] = True, tree.ancestors()
            if self.window:
                where = np.concatenate((np.arange(start), start + depths))
                mask[b, 0, :count, : start + count] &= (start + depths)[:, None] - where < self.window
        feed = {"input_ids": tokens, "position_ids": positions, "logit_nodes": np.arange(nodes, dtype=np.int32)}
        feed |= {"write_rows": np.array(self.lengths, dtype=np.int32), f"mask.{self.window}": mask, **self.caches}
        logits, *presents = self.session.run(None, feed)
        self.caches = dict(zip(self.caches, presents, strict=True))
        return np.asarray(logits)


def check(model, session):
    """Prompts of two lengths, then two trees: every node's logits are its path's."""
    logits = session.step([Tree.chain(prompt) for prompt in PROMPTS])
    for rows, prompt in zip(logits, PROMPTS, strict=True):
        np.testing.assert_allclose(rows[: len(prompt)], reference(model, prompt), rtol=1e-4, atol=1e-4)
    session.lengths = [len(prompt) for prompt in PROMPTS]
    trees = [branching(0, NODES), branching(1, NODES - 4)]
    for rows, prompt, tree in zip(session.step(trees), PROMPTS, trees, strict=True):
        for node in range(len(tree)):
            expected = reference(model, [*prompt, tree.tokens[0], *tree.path(node)])[-1]
            np.testing.assert_allclose(rows[node], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.soak(only=("mha, tied", "llama3"))
@pytest.mark.nightly(but=("gqa",))
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_transformers(make_model, tmp_path, name):
    model = make_model(**VARIANTS[name])
    check(model, Session(lower(fused(model), "fp32", CAPACITY), tmp_path / "model.onnx"))


@pytest.mark.slow
def test_numbers_too_large_are_refused(make_model, tmp_path):
    """When they are written."""
    model = make_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[3, 3] = 1e5
    portable = fused(model)
    with pytest.raises(OptionError, match=r"embed_tokens.* has numbers too large for float16: use bf16 or fp32"):
        save(lower(portable, "fp16", CAPACITY), tmp_path / "a.onnx")
    save(lower(portable, "bf16", CAPACITY), tmp_path / "b.onnx")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "window", "fields"),
    [
        ("mistral", 5, {"sliding_window": 5}),
        ("gemma2", 0, {"attn_logit_softcapping": 0.5, "head_dim": 16, "layer_types": ["full_attention"] * 3}),
    ],
    ids=["a window is a mask", "a soft-cap is written out"],
)
def test_other_attentions(tmp_path, model_type, window, fields):
    model = random_model(model_type, **fields)
    check(model, Session(lower(fused(model), "fp32", CAPACITY), tmp_path / "model.onnx", window))


@pytest.mark.slow
@pytest.mark.parametrize("precision", DTYPES)
def test_numbers_are_of_the_type_that_is_computed_in(make_model, precision):
    """And the portable graph is as it was."""
    portable, dtype = fused(make_model()), DTYPES[precision]
    before = ir.to_proto(portable).SerializeToString()
    model = lower(portable, precision, CAPACITY)
    assert ir.to_proto(portable).SerializeToString() == before
    assert {node.domain for node in model.graph} == {""}
    assert {value.dtype for value in model.graph.inputs if str(value.name).startswith("past")} == {dtype}
    assert {v.dtype for v in model.graph.initializers.values()} <= {dtype, ir.DataType.INT64}
    assert model.graph.outputs[0].dtype == ir.DataType.FLOAT
    onnx.checker.check_model(ir.to_proto(model), full_check=precision != "bf16")
