"""What a model's attention is found to be before its weights are loaded, and what is refused."""

import pytest
from tiny_families import SIZES
from transformers import AutoConfig

from specbuild.builder.frontend.attention_layout import Layout, probe
from specbuild.runtime.errors import CheckpointError

BASE = SIZES | {"vocab_size": 97, "num_hidden_layers": 3, "max_position_embeddings": 128}


def config(model_type, **fields):
    return AutoConfig.for_model(model_type, **BASE | fields)


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [
        ("llama", {}, Layout.alike(2, 16, (0, 0, 0))),
        ("mistral", {"sliding_window": 8}, Layout.alike(2, 16, (8, 8, 8))),
        ("mistral", {"sliding_window": 63}, Layout.alike(2, 16, (63, 63, 63))),
        ("mistral", {"sliding_window": 64}, Layout.alike(2, 16, (0, 0, 0))),  # never shorter than the text
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
            Layout.alike(2, 16, (0, 0, 5)),
        ),
        ("gemma2", {"sliding_window": 8}, Layout.alike(2, 16, (8, 0, 8))),
        ("gpt_neox", {}, Layout.alike(4, 16, (0, 0, 0))),
        ("llama4_text", {"attention_chunk_size": 8, "intermediate_size_mlp": 96}, Layout.alike(2, 16, (-8, -8, -8))),
    ],
)
def test_found(model_type, fields, expected):
    asked = config(model_type, **fields)
    implementation = asked._attn_implementation
    assert probe(asked, 64) == expected
    assert len(expected.caches) == 3
    assert asked._attn_implementation == implementation


@pytest.mark.parametrize(
    ("model_type", "fields", "reason"),
    [
        ("bloom", {}, "attention interface"),
        ("inkling_text", {}, "position_bias"),
        ("llama4_text", {"floor_scale": 32, "intermediate_size_mlp": 96}, "--max-seq-len 31$"),
        ("bert", {"is_decoder": False}, "looks ahead"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "looks ahead"),
    ],
)
def test_what_attention_does_not_do_as_a_tree_needs_it_is_refused(model_type, fields, reason):
    with pytest.raises(CheckpointError, match=reason) as caught:
        probe(config(model_type, **fields), 64)
    assert "\n" not in str(caught.value)


def test_recurrent_layers_are_counted(monkeypatch):
    """A model whose layers do not all call the attention interface, whatever its configuration says."""
    from transformers.models.llama import modeling_llama

    original = modeling_llama.LlamaAttention.forward

    def forward(self, hidden_states, **options):
        return (hidden_states, None) if self.layer_idx == 1 else original(self, hidden_states, **options)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    with pytest.raises(CheckpointError, match="3 layers, 2 of which"):
        probe(config("llama"), 64)


def test_another_mask_is_refused(monkeypatch):
    """As of a model that sees every second position by itself, whatever its configuration says."""
    from transformers.models.llama import modeling_llama

    real = modeling_llama.create_causal_mask
    parity = {"and_mask_function": lambda batch, head, query, key: (query - key) % 2 == 0}
    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda **given: real(**given, **parity))
    with pytest.raises(CheckpointError, match="neither causal nor a sliding window"):
        probe(config("llama"), 64)


def test_nothing_is_allocated():
    """A model of 4 terabytes is looked at in no memory."""
    large = config("llama", hidden_size=65536, intermediate_size=262144, num_attention_heads=4096, num_hidden_layers=8)
    assert len(probe(large, 64).caches) == 8
