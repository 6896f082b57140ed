"""The portable model: the model that it was made of is as it was afterwards, whatever ends it."""

import contextlib

import numpy as np
import pytest
import torch
from small_models import reference
from torch import nn
from transformers.models.llama import modeling_llama

from specbuild.builder.frontend.attention_layout import probe
from specbuild.builder.frontend.export import export, portable
from specbuild.runtime.errors import CheckpointError

PROMPT = [5, 17, 3, 88, 42, 9, 9, 61]
CAPACITY = 40


def state(model):
    rotation = modeling_llama.apply_rotary_pos_emb
    return model.config._attn_implementation, model.model.rotary_emb, rotation, set(model.state_dict())


@pytest.mark.parametrize("error", [False, True])
def test_the_model_is_as_it_was_afterwards(make_model, error):
    """What it computes meanwhile is what tests/builder/lower holds against transformers."""
    model = make_model(num_hidden_layers=1).train(error)
    before, logits = state(model), reference(model, PROMPT)
    with contextlib.suppress(RuntimeError), portable(model, probe(model.config, CAPACITY), CAPACITY, CAPACITY):
        assert state(model) != before
        assert not model.training
        if error:
            raise RuntimeError("stop")
    assert (state(model), model.training) == (before, error)
    np.testing.assert_array_equal(reference(model, PROMPT), logits)


class Bessel(nn.Module):
    """An operator that ONNX lacks."""

    def forward(self, x):
        return torch.special.i1(x)


@pytest.mark.slow
def test_an_operator_that_onnx_lacks_is_named(make_model):
    model = make_model(num_hidden_layers=1)
    model.model.norm = Bessel()
    with pytest.raises(CheckpointError, match=r"^LlamaForCausalLM cannot be exported by torch.onnx: ONNX has no \S+i1"):
        export(model, probe(model.config, CAPACITY), CAPACITY, CAPACITY)
