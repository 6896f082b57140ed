"""Which layers are copies of others: those that compute the same, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from specbuild.builder.frontend.repeated_layers import Repeated, repeated

Make = Callable[..., Any]


def found(model: Any, settings: list[Any] | None = None) -> Repeated | None:
    layers = model.model.layers
    tokens = torch.randint(97, (2, 5), generator=torch.Generator().manual_seed(0))
    return repeated(model, layers, settings or [0] * len(layers), lambda: model(input_ids=tokens, use_cache=False))


def test_alike_but_for_their_weights(make_model: Make) -> None:
    model = make_model(num_hidden_layers=6)
    repeats = found(model)
    assert repeats
    assert (repeats.path, repeats.like, repeats.traced) == ("model.layers", dict.fromkeys(range(2, 6), 1), [0, 1])


def test_settings_tell_layers_apart(make_model: Make) -> None:
    model = make_model(num_hidden_layers=6)
    repeats = found(model, [0, 0, 7, 0, 7, 7])
    assert repeats
    assert repeats.like == {3: 1, 4: 2, 5: 2}
    model.model.layers[4].self_attn.scaling *= 2
    other = found(model)
    assert other
    assert other.traced == [0, 1, 4]


def test_what_a_layer_computes_tells_it_apart(make_model: Make) -> None:
    """Nothing shows outside that the number of a layer counts."""
    model = make_model(num_hidden_layers=5)
    norm = model.model.layers[3].input_layernorm
    norm.forward = lambda hidden: 2 * type(norm).forward(norm, hidden)
    repeats = found(model)
    assert repeats
    assert repeats.traced == [0, 1, 3]


def test_while_they_are_left_out_hidden_states_pass_by(make_model: Make) -> None:
    model = make_model(num_hidden_layers=6)
    tokens, whole = torch.tensor([[5, 6, 7]]), list(model.model.layers)
    repeats = found(model)
    assert repeats
    expected = model(input_ids=tokens).logits
    with repeats.skipped(), torch.no_grad():
        hidden = model.model.embed_tokens(tokens)
        names = {name for name, _ in model.named_parameters()}
        few = model(input_ids=tokens).logits
        assert model.model.layers[4].self_attn is whole[4].self_attn, "its settings can be read"
    assert not any(name.startswith("model.layers.4.") for name in names)
    assert any(name.startswith("model.layers.1.") for name in names)
    assert list(model.model.layers) == whole
    assert hidden.shape[-1] == 32
    short = make_model(num_hidden_layers=2)
    short.load_state_dict({name: value for name, value in model.state_dict().items() if name in short.state_dict()})
    torch.testing.assert_close(few, short(input_ids=tokens).logits)
    torch.testing.assert_close(model(input_ids=tokens).logits, expected)


def test_what_fails_meanwhile_leaves_the_model_as_it_was(make_model: Make) -> None:
    model = make_model(num_hidden_layers=5)
    whole, repeats = list(model.model.layers), found(model)
    assert repeats
    with pytest.raises(KeyError), repeats.skipped():
        raise KeyError
    assert list(model.model.layers) == whole
    assert not any(layer._forward_hooks for layer in whole)


def test_few_layers_and_those_in_no_list_of_the_module_are_traced(make_model: Make) -> None:
    assert found(make_model(num_hidden_layers=3)) is None
    model = make_model(num_hidden_layers=5)
    layers = nn.ModuleList(list(model.model.layers))
    assert repeated(model, layers, [0] * 5, lambda: None) is None
