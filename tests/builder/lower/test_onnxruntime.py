"""The lowered graph: one GroupQueryAttention per layer and lane, and transformers' logits when ONNX Runtime runs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import small_models
from small_models import LLAMA3, branching, reference

from specbuild.builder.frontend.attention_layout import probe
from specbuild.builder.lower.onnxruntime import cache_width, lower
from specbuild.runtime.backends.cpu.executor import OrtExecutor
from specbuild.runtime.backends.executor import Executor, ModelSpec, StepInput
from specbuild.runtime.speculation.tree import Tree

Make = Callable[..., Any]
CAPACITY = 40
VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mqa, biases": {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    "mha, tied, linear": {
        "vocab_size": 1024,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.5},
    },
    "llama3": {"rope_parameters": LLAMA3},
    "gelu": {"hidden_act": "gelu"},
    "odd": {
        "vocab_size": 101,
        "hidden_size": 39,
        "intermediate_size": 53,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 48,
        "rms_norm_eps": 1e-2,
    },
    "heads of 24, rotated outside": {"head_dim": 24},
    "heads of 6, padded": {"head_dim": 6, "attention_bias": True},
}
PROMPT = [5, 17, 3, 88, 42, 9, 9, 61]


def fused(model: Any) -> ir.Model:
    return small_models.fused(model, CAPACITY)


def compiled(model: Any, path: Path, batch_size: int) -> Executor:
    ir.save(lower(fused(model), batch_size, CAPACITY), path)
    layout = probe(model.config, CAPACITY)
    width, windows = cache_width(layout.head_dim), tuple(sorted(set(layout.windows)))
    spec = ModelSpec("test", layout.layers, layout.kv_heads, width, model.config.vocab_size, CAPACITY, 16, windows)
    return OrtExecutor(path, spec, batch_size, threads=1)


def share(slot: int, start: int, tree: Tree) -> StepInput:
    visible = None if tree.is_chain else tree.ancestors()
    return StepInput(slot, start, start, tree.tokens, [start + d for d in tree.depths], visible, len(tree))


@pytest.mark.soak(only=("mha, tied, linear", "llama3", "gelu", "heads of 24, rotated outside"))
@pytest.mark.nightly
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_transformers(make_model: Make, tmp_path: Path, name: str) -> None:
    model = make_model(**{"num_hidden_layers": 1} | VARIANTS[name])
    executor = compiled(model, tmp_path / "model.onnx", 1)
    (rows,) = executor.step([share(0, 0, Tree.chain(PROMPT[:5]))])
    expected = reference(model, PROMPT)
    np.testing.assert_allclose(rows, expected[:5], rtol=1e-4, atol=1e-4)
    (rows,) = executor.step([share(0, 5, Tree.chain(PROMPT[5:]))])
    np.testing.assert_allclose(rows, expected[5:], rtol=1e-4, atol=1e-4)
    tree = branching(0, 9)
    (rows,) = executor.step([share(0, len(PROMPT), tree)])
    for node in range(len(tree)):
        path = reference(model, [*PROMPT, tree.tokens[0], *tree.path(node)])
        np.testing.assert_allclose(rows[node], path[-1], rtol=1e-4, atol=1e-4)
    executor.close()


@pytest.mark.nightly
def test_lanes_do_not_see_each_other(make_model: Make, tmp_path: Path) -> None:
    model = make_model()
    executor = compiled(model, tmp_path / "model.onnx", 3)
    prompts = [PROMPT, PROMPT[::-1][:3]]
    for slot, prompt in zip((2, 0), prompts, strict=True):
        executor.step([share(slot, 0, Tree.chain(prompt))])
        executor.commit(slot, (), len(prompt))
    trees = [branching(1, 7), branching(2, 4)]
    both = [share(slot, len(p), t) for slot, p, t in zip((2, 0), prompts, trees, strict=True)]
    for rows, prompt, tree in zip(executor.step(both), prompts, trees, strict=True):
        for node in range(len(tree)):
            expected = reference(model, [*prompt, tree.tokens[0], *tree.path(node)])[-1]
            np.testing.assert_allclose(rows[node], expected, rtol=1e-4, atol=1e-4)
    executor.close()
