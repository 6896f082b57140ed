"""A smaller model has a target's architecture, sizes in proportion, and what fits of the target's weights."""

import numpy as np
import pytest
import torch
from transformers import GPT2Config, LlamaConfig, SmolLM3Config

from specbuild.builder.distill.make import Plan
from specbuild.builder.distill.shape import derive
from specbuild.builder.frontend import checkpoint as checkpoints
from specbuild.runtime.errors import OptionError

SIZES = {"vocab_size": 97, "hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8}
LLAMA = LlamaConfig(**SIZES, intermediate_size=192, num_key_value_heads=2, head_dim=16)


def test_a_smaller_draft_takes_what_fits(asked, target):
    found = checkpoints.find(str(target))
    model = checkpoints.load(found, "sdpa")
    student, began = Plan.of(asked(layers=2, intermediate_size=16), found).student(model, np.ones(4096, int))
    assert began["narrowed"] == 6
    assert began["random"] == 0
    ours, theirs = student.net.model.layers[1], model.model.layers[2]
    assert torch.equal(ours.self_attn.q_proj.weight, theirs.self_attn.q_proj.weight)
    up, down = theirs.mlp.up_proj.weight, theirs.mlp.down_proj.weight
    kept = (up.norm(dim=1) * down.norm(dim=0)).argsort(descending=True)[:16].sort().values
    assert torch.equal(ours.mlp.down_proj.weight, down[:, kept])
    assert torch.equal(ours.mlp.gate_proj.weight, theirs.mlp.gate_proj.weight[kept])
    student, began = Plan.of(asked(hidden_size=16), found).student(model, np.ones(4096, int))
    assert (began["narrowed"], student.net.config.num_attention_heads) == (2, 2)
    embedding = student.net.get_input_embeddings().weight  # as near to the target's as 16 numbers can be
    theirs = model.get_input_embeddings().weight
    assert torch.allclose((embedding**2).sum(), (torch.linalg.svdvals(theirs)[:16] ** 2).sum(), rtol=1e-4)


def sizes(config):
    heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    return config.num_hidden_layers, config.hidden_size, config.intermediate_size, *heads


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (1, 96, 128, 8, 2, 16)),  # one layer, its MLP two thirds of the target's
        ({"layers": 2}, (2, 96, 192, 8, 2, 16)),  # asked for, layers are the target's own
        ({"hidden_size": 12}, (1, 12, 16, 1, 1, 16)),
        ({"num_heads": 6, "num_kv_heads": 3, "intermediate_size": 7}, (1, 96, 7, 6, 3, 16)),
        ({"init": "random", "layers": 5, "hidden_size": 192}, (5, 192, 384, 16, 4, 16)),
    ],
)
def test_what_was_not_asked_for_shrinks_with_the_width(asked, options, expected):
    assert sizes(derive(asked(**options), LLAMA)) == expected


def test_what_is_said_of_each_layer_is_said_of_those_it_has(asked):
    """Other lists of the same length stay whole."""
    more = {"num_key_value_heads": 2, "intermediate_size": 192, "pad_token_id": 0, "eos_token_id": [3, 4, 5, 6]}
    found = derive(asked(layers=2), SmolLM3Config(**SIZES, **more, no_rope_layers=[1, 1, 1, 0]))
    assert (found.no_rope_layers, found.layer_types) == ([1, 0], ["full_attention"] * 2)
    assert found.eos_token_id == [3, 4, 5, 6]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 5}, "--layers 4, not 5"),
        ({"hidden_size": 97}, "--hidden-size 96, not 97"),
        ({"num_heads": 3, "num_kv_heads": 2}, "--num-heads 3 is no multiple of 2"),
    ],
)
def test_a_shape_that_the_target_has_not_is_refused(asked, options, message):
    with pytest.raises(OptionError, match=message):
        derive(asked(**options), LLAMA)


def test_what_a_family_has_not_is_refused_by_its_flag(asked):
    gpt2 = GPT2Config(**SIZES)
    assert derive(asked(hidden_size=48), gpt2).n_head == 4
    with pytest.raises(OptionError, match=r"^'gpt2' models have no num_kv_heads: drop --num-kv-heads$"):
        derive(asked(num_kv_heads=1), gpt2)
    with pytest.raises(OptionError, match=r"^no 'gpt2' model has this shape, .*: give another$"):
        derive(asked(num_heads=5), gpt2)
