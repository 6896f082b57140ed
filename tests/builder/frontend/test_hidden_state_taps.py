"""Taps catch the hidden states between a model's layers, and say which layers a head reads."""

from contextlib import suppress
from typing import Any

import pytest
import torch
from small_models import random_model
from torch import Tensor, nn

from specbuild.builder.frontend.hidden_state_taps import Taps, decoder_layers, default_taps, read_taps
from specbuild.runtime.errors import CheckpointError

TEXT = torch.tensor([[5, 17, 3, 88], [42, 9, 9, 61]])


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "opt", "gpt_neox"])
@torch.no_grad()
def test_a_tap_is_what_its_layer_reads(model_type):
    """And after the last layer its output; every run is seen while inside, and none afterwards, an error or not."""
    model, outputs = random_model(model_type), list[Any]()
    norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(3))  # no list of layers
    model._modules = {"norms": norms, **model._modules}
    decoder_layers(model)[-1].register_forward_hook(lambda *given: outputs.append(given[-1]))
    taps = Taps((2, 0, 1, 3), nn.Identity())
    with taps.watching(model):
        for text in (TEXT, TEXT.flip(1)):
            hidden = model(input_ids=text, output_hidden_states=True).hidden_states
            last = outputs[-1] if isinstance(outputs[-1], Tensor) else outputs[-1][0]
            expected = torch.cat([*(hidden[place] for place in (2, 0, 1)), last], -1)
            torch.testing.assert_close(taps.states(), expected, rtol=0, atol=0)
    with suppress(ZeroDivisionError), taps.watching(model):
        raise ZeroDivisionError
    model(input_ids=TEXT)
    with pytest.raises(KeyError):
        taps.states()


def test_a_model_without_its_list_of_layers_is_refused():
    model = random_model("llama")
    model.config.num_hidden_layers = 5
    assert decoder_layers(model) == []
    with (
        pytest.raises(CheckpointError, match="LlamaForCausalLM has no list of layers"),
        Taps((0, 2), nn.Identity()).watching(model),
    ):
        pytest.fail("is watched")


def test_layers_that_no_one_names_are_spread():
    assert default_taps(32) == (2, 16, 29)
    assert default_taps(6) == (2, 3, 5)
    for layers in range(1, 12):
        taps = default_taps(layers)
        assert taps[0] != 1  # a list that begins with 1 counts outputs
        assert list(taps) == sorted(set(taps))
        assert taps[-1] < layers


@pytest.mark.parametrize(
    ("ids", "places"), [([2, 16, 29], [2, 16, 29]), ([1, 15, 28], [2, 16, 29]), (None, [2, 16, 29]), ([], [2, 16, 29])]
)
def test_a_list_that_begins_with_1_counts_outputs(ids, places):
    assert read_taps(ids, 32) == places
