"""Scales of FP8 caches, and models that run over such caches in PyTorch."""

import numpy as np
import pytest
import torch
from plugin_lowering import MODELS, make
from small_models import reference

from specbuild.builder.frontend.layer_by_layer import LayeredModel
from specbuild.builder.quantize.fp8_caches import Scales, cached_logits, calibrate

TEXTS = [[5, 17, 3, 88, 42, 9, 9, 61], [61, 4, 4], list(range(20, 50))]


def largest(model, texts):
    """Of every head, `[2, layers, Hkv]`: what transformers' own cache has."""
    found = []
    for text in texts:
        with torch.no_grad():
            layers = model(input_ids=torch.tensor([text]), use_cache=True).past_key_values.layers
        found.append([[x.abs().amax((0, 2, 3)).numpy() for x in (each.keys, each.values)] for each in layers])
    return np.array(found, dtype=np.float32).max(0).swapaxes(0, 1)


def scaled(model, layer, head, by):
    """Make a KV head's values larger."""
    projection = model.model.layers[layer].self_attn.v_proj
    with torch.no_grad():
        projection.weight[head * 16 : (head + 1) * 16] *= by


@pytest.mark.parametrize("name", ["gqa", "norms of heads", "a layer without rotation"])
def test_scales_are_of_what_is_cached(name):
    """Normed and rotated; twice the largest number of all texts is E4M3's largest."""
    model_type, fields, _ = MODELS[name]
    model = make(model_type, **fields)
    found = calibrate(LayeredModel.of(model), TEXTS)
    np.testing.assert_allclose((found.key, found.value), largest(model, TEXTS) * 2 / 448, rtol=1e-5)


def test_an_outlier_has_a_scale_of_its_own_and_nothing_overflows(make_model):
    """Nor does a head that is 0 throughout; what lies far beyond the scales saturates, and is no NaN."""
    model = make_model()
    before = calibrate(LayeredModel.of(model), TEXTS)
    scaled(model, 0, 1, 1000.0)
    scaled(model, 1, 0, 0.0)
    scales = calibrate(LayeredModel.of(model), TEXTS)
    np.testing.assert_allclose(scales.value[0] / before.value[0], [1, 1000], rtol=1e-4)
    np.testing.assert_array_equal(scales.key[0], before.key[0])
    assert scales.value[1, 0] > 0
    exact, rounded = reference(model, TEXTS[0]), cached_logits(LayeredModel.of(model), TEXTS[:1], scales)[0]
    assert 0 < np.abs(rounded - exact).mean() < 0.1 * np.abs(exact).mean()
    (far,) = cached_logits(LayeredModel.of(model), TEXTS[:1], Scales(scales.key, scales.value / 1e4))
    assert np.isfinite(far).all()


def test_a_window_s_earlier_rows_count():
    """Which transformers' own cache has dropped by the end of a text."""
    model = make("mistral", sliding_window=4)
    alone, after = (
        calibrate(LayeredModel.of(model), [[7, 7]]),
        calibrate(LayeredModel.of(model), [[7, 7, *range(30, 50)]]),
    )
    assert (after.value >= alone.value).all()


@pytest.mark.parametrize("name", [*MODELS, "gpt2"])
def test_the_attention_is_the_model_s_own(name):
    """Rounding moves it by a little; `lower/test_plugin.py` holds a few families against another implementation."""
    model_type, fields, _ = MODELS.get(name, ("gpt2", {"hidden_size": 128, "num_attention_heads": 2}, True))
    model, text = make(model_type, **fields), TEXTS[2]
    (rows,), exact = (
        cached_logits(LayeredModel.of(model), [text], calibrate(LayeredModel.of(model), TEXTS)),
        reference(model, text),
    )
    assert 1e-3 < np.linalg.norm(rows - exact) < 0.15 * np.linalg.norm(exact - exact.mean(0))


def test_a_model_is_afterwards_as_it_was(make_model):
    model = make_model()
    before, scales = reference(model, TEXTS[0]), calibrate(LayeredModel.of(model), TEXTS)
    with pytest.raises(IndexError):
        cached_logits(LayeredModel.of(model), TEXTS, Scales(scales.key[:1], scales.value[:1]))
    np.testing.assert_array_equal(reference(model, TEXTS[0]), before)
