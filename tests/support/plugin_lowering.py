"""Random models of many families, and sessions over their graphs around the TensorRT plugin."""

import numpy as np
import onnx_ir as ir
import small_models
import torch
from onnx.reference import ReferenceEvaluator
from plugin_model import TreeAttention
from small_models import LLAMA3
from tiny_models import SIZES

CAPACITY, NODES, SEEN = 40, 9, 4  # of a tree's nodes, those that are in the cache when the others come
PAGE = 8  # rows, less than the builder offers, for short texts over several
PROMPTS = [[5, 17, 3, 88, 42, 9, 9, 61], [61, 4, 4]]
BASE = SIZES | {"head_dim": 64, "pad_token_id": 0}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
LOCAL = ["sliding_attention", "full_attention"]
# name: model type, fields, whether the plugin takes the merged product whole
MODELS = {
    "gqa": ("llama", {}, True),
    "mqa, biases, llama3, tied": (
        "llama",
        {"num_key_value_heads": 1, "attention_bias": True, "rope_parameters": LLAMA3, "head_dim": 80}
        | {"tie_word_embeddings": True},
        True,
    ),
    "norms of heads": ("qwen3", {}, False),
    "norms after the transpose, two tables": ("gemma3_text", {"sliding_window": 6, "layer_types": LOCAL}, False),
    "a rotated half": ("phi3", {"rope_parameters": PARTIAL}, False),
    "a layer without rotation": ("smollm3", {"no_rope_layers": [1, 0]}, True),
    "window": ("mistral", {"sliding_window": 5}, True),
    "soft-cap": ("gemma2", {"sliding_window": 7, "attn_logit_softcapping": 5.0}, True),
}


def make(model_type, **fields):
    """A random float32 model of any family whose every weight counts."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **BASE | fields)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            centre = weight.mean().round() if weight.ndim == 1 else 0.0  # of a norm: 0 or 1
            scale = 0.2 if weight.ndim == 1 else weight.shape[-1] ** -0.5
            weight.copy_(centre + scale * torch.randn(weight.shape, generator=generator))
    return model


def fused(model):
    return small_models.fused(model, CAPACITY)


class Session:
    """The lowered graph with its caches; every sequence's rows begin at its own length. What is not there is NaN.

    Paged caches have a page more than the sequences, and theirs in any order.
    """

    def __init__(self, graph):
        self.evaluator = ReferenceEvaluator(ir.to_proto(graph), new_ops=[TreeAttention])
        self.lengths = [0] * len(PROMPTS)
        inputs, self.table = {str(value.name): value for value in graph.graph.inputs}, dict[str, np.ndarray]()
        first = len(PROMPTS)
        if "page_table" in inputs:
            pages = int(inputs["page_table"].shape[1])
            first = 1 + first * pages
            order = np.random.default_rng(0).permutation(first)[1:].astype(np.int32)
            self.table = {"page_table": order.reshape(len(PROMPTS), pages)}
        self.caches = {
            name: np.full((first, *value.shape[1:]), np.nan, dtype=value.dtype.numpy())
            for name, value in inputs.items()
            if name.startswith("past")
        }

    def step(self, trees, begin, end):
        """Logits `[n, V]` of each tree's nodes `begin … end − 1`."""
        counts = [max(0, min(end, len(tree)) - begin) for tree in trees]
        tokens = np.full((len(trees), max(counts)), 96, dtype=np.int32)
        parents = np.full((len(trees), max(map(len, trees))), -1, dtype=np.int32)
        for b, tree in enumerate(trees):
            tokens[b, : counts[b]], parents[b, : len(tree)] = tree.tokens[begin:end], tree.parents
        vectors = {"cache_len": self.lengths, "tree_offset": [begin] * len(trees), "counts": counts}
        feed = {"input_ids": tokens, "parents": parents, "logit_nodes": np.arange(max(counts), dtype=np.int32)}
        feed |= {name: np.array(values, dtype=np.int32) for name, values in vectors.items()}
        logits, *presents = self.evaluator.run(None, feed | self.table | self.caches)
        assert logits.dtype == np.float32
        self.caches = dict(zip(self.caches, presents, strict=True))
        return [rows[:count] for rows, count in zip(logits, counts, strict=True)]
