"""A compiled network's layers are told by type and by the model's layer that they came from."""

from collections import Counter

import pytest

from specbuild.builder.codegen.engine_layers import describe, in_words

LAYERS = [
    ("rotary.0.query", "ROTARY_EMBEDDING"),
    ("rotary.0.key", "ROTARY_EMBEDDING"),
    ("cache.0.key", "KV_CACHE_UPDATE"),
    ("attention.0_AttentionInput", "ATTENTION_INPUT"),
    ("mlp", "MATRIX_MULTIPLY"),
    ("attention.1", "PLUGIN_V3"),
]


def test_what_attention_became_in_each_layer():
    found = describe(LAYERS, 2)
    assert found["layers"] == [{"name": name, "type": kind} for name, kind in LAYERS]
    assert found["layer_types"] == Counter(kind for _, kind in LAYERS)
    assert found["model_layers"] == [
        {
            "layer": 0,
            "attention": ["attention.0_AttentionInput"],
            "kv_cache_update": ["cache.0.key"],
            "rotary_embedding": ["rotary.0.query", "rotary.0.key"],
        },
        {"layer": 1, "attention": ["attention.1"], "kv_cache_update": [], "rotary_embedding": []},
    ]


@pytest.mark.parametrize(("name", "kind"), [("attention.2", "PLUGIN_V3"), ("attention.0", "MATRIX_MULTIPLY")])
def test_a_layer_that_is_nobodys_is_listed_alone(name, kind):
    """Of a layer that the model has not, and of a type that is none of attention's."""
    found = describe([(name, kind)], 2)
    assert found["layers"] == [{"name": name, "type": kind}]
    assert not any(each[role] for each in found["model_layers"] for role in each if role != "layer")
    quantized = [*LAYERS, *[("q", "QUANTIZE")] * 4, *[("d", "DEQUANTIZE")] * 8]
    assert in_words(describe(LAYERS, 2)).startswith("6 layers; of the model's 2: attention in 2, KV-cache update in 1")
    assert in_words(describe(quantized, 2)).endswith("; 4 quantized weights, 4 quantized inputs")
