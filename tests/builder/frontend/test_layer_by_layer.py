"""A model run a layer at a time, without weights of its own, computes what the whole model computes."""

import numpy as np
import pytest
import torch
from small_models import random_model

from specbuild.builder.frontend import reference
from specbuild.builder.frontend.layer_by_layer import LayeredModel, State
from specbuild.builder.frontend.lazy_weights import of_model, of_names, skeleton
from specbuild.builder.frontend.vocabulary import Vocabulary, fit

TEXTS = [[5, 17, 30, 5], [42], [1, 2, 3]]
MODELS = {
    "llama": {"num_hidden_layers": 3},
    "gemma2": {"head_dim": 16, "num_hidden_layers": 2},
    "gpt2": {"num_hidden_layers": 2},
    "qwen2": {"num_hidden_layers": 2, "tie_word_embeddings": True},
    "qwen3_moe": {"num_hidden_layers": 2, "head_dim": 16},
}


@pytest.mark.slow(only=("gemma2", "qwen3_moe"))
@pytest.mark.parametrize("family", MODELS)
def test_logits_are_the_whole_models(family):
    whole = random_model(family, **MODELS[family])
    whole.set_attn_implementation("eager")
    empty = skeleton(whole.config, "eager")
    found = LayeredModel(empty, of_names(empty, of_model(whole))).logits(TEXTS)
    for text, logits in zip(TEXTS, found, strict=True):
        np.testing.assert_allclose(logits, reference.text_logits(whole, text), rtol=1e-5, atol=1e-5)


@pytest.mark.slow(only=("gemma2", "qwen3_moe"))
@pytest.mark.parametrize("family", MODELS)
def test_states_of_one_text_are_the_same_in_a_batch(family):
    """More of them than one batch holds; before the first layer there are none."""
    model = LayeredModel.of(random_model(family, **MODELS[family]))
    text, count = TEXTS[0], 20
    with model.reading(0, [text]):
        first, second = (state.result for state in model.run_batch(0, text, [None] * 2))
    assert torch.equal(first, second)
    draw = torch.Generator().manual_seed(0)
    states = [State(first + 0.1 * torch.randn(first.shape, generator=draw)) for _ in range(count)]
    with model.reading(1, [text]):
        alone = model.run(1, [text] * count, states)
        batch = model.run_batch(1, text, states)
    for one, other in zip(alone, batch, strict=True):
        torch.testing.assert_close(one.result, other.result, rtol=1e-5, atol=1e-5)
    whole = np.stack(model.ends([text] * count, alone))
    for places, logits in model.ends_by_rows(text, batch):
        np.testing.assert_allclose(logits, whole[:, :, places], rtol=1e-5, atol=1e-5)
        whole[:, :, places] = np.nan
    assert np.isnan(whole).all()


def test_a_model_without_weights_takes_no_memory_and_is_as_it_was_afterwards():
    whole = random_model("llama", num_hidden_layers=2, hidden_size=512, intermediate_size=2048)
    empty = skeleton(whole.config, "eager")
    before = {name: weight.data_ptr() for name, weight in empty.named_parameters()}
    assert {name: weight.shape for name, weight in empty.named_parameters()} == {
        name: weight.shape for name, weight in whole.named_parameters()
    }
    assert sum(weight.untyped_storage().nbytes() for weight in empty.parameters()) < 1 << 20
    LayeredModel(empty, of_names(empty, of_model(whole))).logits(TEXTS)
    assert {name: weight.data_ptr() for name, weight in empty.named_parameters()} == before


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sources", [None, (3, 1, -1, 2, 0)])
@pytest.mark.parametrize("tokens", [None, (0, 2, 4)])
def test_rows_are_picked_of_weights_as_of_a_model(tied, sources, tokens):
    fields = {"num_hidden_layers": 1, "vocab_size": 5, "tie_word_embeddings": tied}
    model, other = (random_model("llama", **fields) for _ in range(2))
    empty = skeleton(other.config, "eager")
    weights = of_names(empty, of_model(other))
    wanted = Vocabulary("intersecting", 5, len(tokens or range(5)), tokens, 3, sources=sources)
    fit(model, wanted)
    fit(empty, wanted, weights)
    got = dict(empty.named_parameters(remove_duplicate=False))
    for name, weight in model.named_parameters(remove_duplicate=False):
        assert got[name].shape == weight.shape
        torch.testing.assert_close(weights[name].read(), weight.detach(), rtol=0, atol=0)
