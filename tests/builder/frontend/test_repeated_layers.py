"""Which layers are copies of others: those that compute the same, and no others."""

from contextlib import suppress

import torch
from torch import nn

from specbuild.builder.frontend.repeated_layers import repeated


def found(model, settings=None):
    layers = model.model.layers
    tokens = torch.randint(97, (2, 5), generator=torch.Generator().manual_seed(0))
    return repeated(model, layers, settings or [0] * len(layers), lambda: model(input_ids=tokens, use_cache=False))


def test_while_they_are_left_out_hidden_states_pass_by(make_model):
    model = make_model(num_hidden_layers=6)
    tokens, whole = torch.tensor([[5, 6, 7]]), list(model.model.layers)
    repeats = found(model)
    assert repeats
    expected = model(input_ids=tokens).logits
    with suppress(ZeroDivisionError), repeats.skipped(), torch.no_grad():
        few = model(input_ids=tokens).logits
        assert model.model.layers[4].self_attn is whole[4].self_attn, "its settings can be read"
        names = {name.split(".")[2] for name, _ in model.named_parameters() if "layers" in name}
        raise ZeroDivisionError
    assert names == {"0", "1"}
    assert list(model.model.layers) == whole
    short = make_model(num_hidden_layers=2)
    short.load_state_dict({name: value for name, value in model.state_dict().items() if name in short.state_dict()})
    torch.testing.assert_close(few, short(input_ids=tokens).logits)
    torch.testing.assert_close(model(input_ids=tokens).logits, expected)


def test_few_layers_and_those_in_no_list_of_the_module_are_traced(make_model):
    assert found(make_model(num_hidden_layers=3)) is None
    model = make_model(num_hidden_layers=5)
    layers = nn.ModuleList(list(model.model.layers))
    assert repeated(model, layers, [0] * 5, lambda: None) is None


def traced(model, settings=None):
    repeats = found(model, settings)
    assert repeats
    return repeats.traced


def test_what_a_layer_computes_and_its_settings_tell_it_apart(make_model):
    """Its weights do not, and nothing shows outside that the number of a layer counts."""
    model = make_model(num_hidden_layers=6)
    assert traced(model) == [0, 1]
    assert traced(model, [0, 0, 7, 0, 7, 7]) == [0, 1, 2]
    model.model.layers[4].self_attn.scaling *= 2
    norm = model.model.layers[3].input_layernorm
    norm.forward = lambda hidden: 2 * type(norm).forward(norm, hidden)
    assert traced(model) == [0, 1, 3, 4]
