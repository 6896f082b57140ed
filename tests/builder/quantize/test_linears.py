"""The weights of a Hugging Face model by name, which of them read one tensor, and the model with others for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import random_model, random_texts
from torch import nn

from specbuild.builder.config.scheme import Scheme
from specbuild.builder.frontend.attention_layout import empty
from specbuild.builder.frontend.hidden_state_taps import decoder_layers
from specbuild.builder.frontend.reference import text_logits
from specbuild.builder.quantize.linears import Names, groups, no_grad, rows, simulated
from specbuild.builder.quantize.numbers import Inputs, Quantized, quantize

TEXT = random_texts()[0]
FAMILIES = ["llama", "gpt2", "opt", "qwen3", "gptj"]
INT8 = Scheme("int8", "fp32", 16, activations="dynamic")
NAMES = {
    "llama": ("model.embed_tokens", "model.layers.0.self_attn.q_proj", 1 + 3 * 7 + 1),
    "gpt2": ("transformer.wte", "transformer.h.0.attn.c_attn", 1 + 3 * 4 + 1),
    "opt": ("model.decoder.embed_tokens", "model.decoder.layers.0.self_attn.k_proj", 1 + 3 * 6 + 1),
}


def found_in(model: Any, scheme: Scheme = INT8) -> dict[str, Quantized]:
    names = Names.of(model).weights
    return {name: quantize({name: rows(model.get_submodule(name))}, scheme)[name] for name in names}


def bits(model: Any) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("family", NAMES)
def test_names(family: str) -> None:
    model = random_model(family)
    embedding, some, count = NAMES[family]
    names = Names.of(model)
    assert (names.embedding, names.head) == (embedding, "lm_head")
    assert names.weights[0] == embedding
    assert some in names.weights
    assert len(names.weights) == len(set(names.weights)) == count
    assert names.tied is (family != "llama")
    assert Names.of(empty(model.config)[1]) == names


def test_tied_names_are_two() -> None:
    names = Names.of(random_model("llama", tie_word_embeddings=True))
    assert names.tied
    assert {names.embedding, "lm_head"} <= set(names.weights)


def test_rows_are_of_outputs() -> None:
    model = random_model("gpt2")
    assert rows(model.get_submodule("transformer.h.0.attn.c_attn")).shape == (3 * 64, 64)
    assert rows(model.get_submodule("transformer.h.0.mlp.c_fc")).shape == (96, 64)
    assert rows(model.get_input_embeddings()).shape == (97, 64)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_simulated_model_is_as_it_was_afterwards(family: str) -> None:
    model = random_model(family)
    before, logits = bits(model), text_logits(model, TEXT)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with simulated(model, found_in(model), lambda *_: None):
        assert not torch.equal(torch.from_numpy(text_logits(model, TEXT)), torch.from_numpy(logits))

    def interrupted() -> None:
        with simulated(model, found_in(model)):
            assert bits(model) != before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    assert bits(model) == before
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameter for name, parameter in parameters.items())
    assert (text_logits(model, TEXT) == logits).all()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_a_name_that_is_none_leaves_the_model_as_it_was() -> None:
    model = random_model("llama")
    before, found = bits(model), found_in(model)
    found["model.layers.0.nothing"] = found["lm_head"]
    with pytest.raises(AttributeError), simulated(model, found):
        pass
    assert bits(model) == before
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_simulated_weights_are_those_of_a_model_that_has_them(family: str) -> None:
    """Of weights alone it is the same as writing the rounded numbers into the model."""
    model, other = random_model(family), random_model(family)
    found = found_in(model, Scheme("int4", "fp32", 16))
    if family in ("gpt2", "opt"):  # tied: one parameter cannot be two
        found.pop("lm_head")
        other.lm_head.weight = nn.Parameter(other.lm_head.weight.detach().clone())
    with torch.no_grad():
        for name, each in found.items():
            module = other.get_submodule(name)
            module.weight.copy_(each.restored().T if module.weight.shape != each.restored().shape else each.restored())
            if module.weight.shape[0] == module.weight.shape[1] and type(module).__name__ == "Conv1D":
                module.weight.copy_(each.restored().T)
    with simulated(model, found):
        ours = text_logits(model, TEXT)
    assert (ours == text_logits(other, TEXT)).all()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_inputs_are_rounded_and_divided_as_they_will_be(family: str) -> None:
    model = random_model(family, num_hidden_layers=1)
    name = {"llama": "model.layers.0.mlp.down_proj", "gpt2": "transformer.h.0.mlp.c_proj"}[family]
    module, x = model.get_submodule(name), torch.randn(2, 5, 96, generator=torch.Generator().manual_seed(0))
    largest = x.abs().amax((0, 1))
    scheme = Scheme("int8", "fp32", activations="static")
    (each,) = quantize({name: rows(module)}, scheme, Inputs(largest, [])).values()
    assert each.smooth is not None
    bias = 0 if module.bias is None else module.bias
    with torch.no_grad(), simulated(model, {name: each}):
        steps = (x / each.smooth / each.input_scale).round()
        expected = steps * each.input_scale @ each.restored().T + bias
        torch.testing.assert_close(module(x), expected)
    with torch.no_grad():
        torch.testing.assert_close(module(x), expected, rtol=0, atol=0.2)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_a_watch_is_told_both_outputs_of_one_input(family: str) -> None:
    model = random_model(family)
    name = {
        "llama": "model.layers.2.mlp.up_proj",
        "gpt2": "transformer.h.2.mlp.c_fc",
        "opt": "model.decoder.layers.2.fc1",
    }
    told: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    outputs: list[torch.Tensor] = []
    undo = model.get_submodule(name[family]).register_forward_hook(lambda _, __, output: outputs.append(output))
    text_logits(model, TEXT)
    found = {name[family]: found_in(model)[name[family]]}
    with no_grad(model), simulated(model, found, lambda *args: told.append(args)):
        text_logits(model, TEXT)
    undo.remove()
    ((seen, ours, exact),) = told
    assert seen == name[family]
    torch.testing.assert_close(exact, outputs[0])
    assert torch.equal(ours, outputs[1])
    assert not torch.equal(ours, exact)


@pytest.mark.parametrize("family", FAMILIES)
def test_decoder_layers_are_in_order(family: str) -> None:
    model, seen = random_model(family), []
    layers = decoder_layers(model)
    assert len(layers) == 3
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, _: seen.append(module))
    text_logits(model, TEXT)
    assert all(a is b for a, b in zip(seen, layers, strict=True))


def test_layers_that_are_not_one_list() -> None:
    model = random_model("llama")
    model.config.num_hidden_layers = 4
    assert decoder_layers(model) == []


def test_lists_without_products_are_not_the_layers() -> None:
    model = random_model("llama")
    layers = decoder_layers(model)
    model.model.norms = nn.ModuleList([nn.LayerNorm(4)] * 3)
    model.model._modules = dict(reversed(model.model._modules.items()))  # found first
    assert decoder_layers(model) == layers


def test_products_of_one_tensor_are_together() -> None:
    at = "model.layers.1."
    names = [n for n in Names.of(random_model("llama")).weights if n.startswith(at)]
    found = groups(random_model("llama"), names)
    assert [[name.removeprefix(at) for name in group] for group in found] == [
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        ["self_attn.o_proj"],
        ["mlp.gate_proj", "mlp.up_proj"],
        ["mlp.down_proj"],
    ]
    only = groups(random_model("llama"), [f"{at}self_attn.v_proj", f"{at}self_attn.q_proj"])
    assert only == [[f"{at}self_attn.q_proj", f"{at}self_attn.v_proj"]]


def test_groups_of_other_families() -> None:
    model = random_model("gpt2", num_hidden_layers=1)
    found = groups(model, Names.of(model).weights[1:])
    inside = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
    assert found == [*([f"transformer.h.0.{name}"] for name in inside), ["lm_head"]]
    model = random_model("opt", num_hidden_layers=1)
    found = groups(model, Names.of(model).weights[1:])
    assert sorted(map(len, found)) == [1, 1, 1, 1, 3]
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_models_cache_is_as_it_was() -> None:
    model = random_model("llama")
    model.config.use_cache = True

    def interrupted() -> None:
        with no_grad(model):
            assert not model.config.use_cache
            assert not torch.is_grad_enabled()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    assert model.config.use_cache
    assert torch.is_grad_enabled()
