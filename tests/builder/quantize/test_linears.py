"""The weights of a Hugging Face model by name, which of them read one tensor, and the model with others for them."""

from contextlib import suppress

import pytest
import torch
from small_models import random_model, random_texts, rows
from torch import nn

from specbuild.builder.config.scheme import Scheme
from specbuild.builder.frontend.attention_layout import empty
from specbuild.builder.frontend.layer_by_layer import LayeredModel
from specbuild.builder.frontend.reference import text_logits
from specbuild.builder.quantize.linears import Names, groups, simulated
from specbuild.builder.quantize.numbers import Inputs, quantize

TEXT = random_texts()[0]
INT8 = Scheme("int8", "fp32", 16, activations="dynamic")
NAMES = {
    "llama": ("model.embed_tokens", "model.layers.0.self_attn.q_proj", 1 + 3 * 7 + 1),
    "gpt2": ("transformer.wte", "transformer.h.0.attn.c_attn", 1 + 3 * 4 + 1),
    "opt": ("model.decoder.embed_tokens", "model.decoder.layers.0.self_attn.k_proj", 1 + 3 * 6 + 1),
}


def found_in(model, scheme=INT8):
    names = Names.of(model).weights
    return {name: quantize({name: rows(model.get_submodule(name))}, scheme)[name] for name in names}


def bits(model):
    return {name: tensor.numpy().tobytes() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("family", NAMES)
def test_names(family):
    model = random_model(family)
    embedding, some, count = NAMES[family]
    names = Names.of(model)
    assert (names.embedding, names.head) == (embedding, "lm_head")
    assert names.weights[0] == embedding
    assert some in names.weights
    assert len(set(names.weights)) == len(names.weights) == count
    assert names.tied is (family != "llama")
    assert Names.of(empty(model.config)[1]) == names


def test_a_name_that_is_none_leaves_the_model_as_it_was():
    model = random_model("llama")
    before, found = text_logits(model, TEXT), found_in(model)
    found["model.layers.0.nothing"] = found["lm_head"]
    with pytest.raises(AttributeError), simulated(LayeredModel.of(model), found):
        pass
    assert (text_logits(model, TEXT) == before).all()


@pytest.mark.parametrize("family", NAMES)
def test_simulated_weights_are_those_of_a_model_that_has_them(family):
    """Of weights alone it is the same as writing the rounded numbers into the model, which is as it was afterwards."""
    model, other = random_model(family), random_model(family)
    before, logits = bits(model), text_logits(model, TEXT)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found = found_in(model, Scheme("int4", "fp32", 16))
    if family != "llama":  # tied: one parameter cannot be two
        found.pop("lm_head")
        other.lm_head.weight = nn.Parameter(other.lm_head.weight.detach().clone())
    with torch.no_grad():
        for name, each in found.items():
            module = other.get_submodule(name)
            turned = type(module).__name__ == "Conv1D"
            module.weight.copy_(each.restored().T if turned else each.restored())
    with suppress(ZeroDivisionError), simulated(LayeredModel.of(model), found) as changed:
        assert (changed.logits([TEXT])[0] == text_logits(other, TEXT)).all()
        raise ZeroDivisionError
    assert bits(model) == before
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameter for name, parameter in parameters.items())
    assert (text_logits(model, TEXT) == logits).all()


@pytest.mark.parametrize(
    ("family", "name"), [("llama", "model.layers.0.mlp.down_proj"), ("gpt2", "transformer.h.0.mlp.c_proj")]
)
def test_inputs_are_rounded_and_divided_as_they_will_be(family, name):
    model = random_model(family, num_hidden_layers=1)
    module, x = model.get_submodule(name), torch.randn(2, 5, 96, generator=torch.Generator().manual_seed(0))
    scheme = Scheme("int8", "fp32", activations="static")
    (each,) = quantize({name: rows(module)}, scheme, Inputs(x.abs().amax((0, 1)), [])).values()
    layered = LayeredModel.of(model)
    with torch.no_grad(), simulated(layered, {name: each}) as changed, changed.holding([name], [TEXT]):
        steps = (x / each.smooth / each.input_scale).round()
        expected = steps * each.input_scale @ each.restored().T + (0 if module.bias is None else module.bias)
        torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize(
    ("family", "inside"),
    [
        (
            "llama",
            "self_attn.q_proj self_attn.k_proj self_attn.v_proj|self_attn.o_proj|"
            "mlp.gate_proj mlp.up_proj|mlp.down_proj",
        ),
        ("gpt2", "attn.c_attn|attn.c_proj|mlp.c_fc|mlp.c_proj"),
        ("opt", "self_attn.q_proj self_attn.k_proj self_attn.v_proj|self_attn.out_proj|fc1|fc2"),
    ],
)
def test_products_of_one_tensor_are_together(family, inside):
    model = random_model(family, num_hidden_layers=1)
    layer = Names.of(model).weights[-2].partition(".0.")[0]
    expected = [[f"{layer}.0.{name}" for name in group.split()] for group in inside.split("|")]
    assert groups(LayeredModel.of(model), Names.of(model).weights[1:]) == [*expected, ["lm_head"]]
    assert groups(LayeredModel.of(model), expected[0][::-1][:2]) == [expected[0][-2:]]


def test_weights_that_are_not_tied_whatever_the_configuration_says():
    model = random_model("llama", num_hidden_layers=1, tie_word_embeddings=True)
    assert Names.of(model).tied
    model.lm_head.weight = nn.Parameter(1 + model.lm_head.weight.detach())
    assert not Names.of(model).tied
