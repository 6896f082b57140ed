"""How far 16 bits and FP8 caches move a model's logits."""

import numpy as np
import pytest
import torch

from specbuild.builder.check.rounding import measure
from specbuild.builder.frontend.layer_by_layer import LayeredModel
from specbuild.builder.quantize.fp8_caches import Scales, cached_logits, calibrate
from specbuild.builder.quantize.quality import Before
from specbuild.measure.divergence import kl
from specbuild.runtime.errors import ExecutionError

TEXTS = [[5, 17, 3, 88, 42, 9, 9], [61, 4, 4, 8], list(range(40))]


def logits_of(model):
    return model.logits(TEXTS)


def of(logits):
    return Before(TEXTS, logits)


@pytest.fixture
def made(make_model):
    return lambda: LayeredModel.of(make_model())


def test_sixteen_bits_alone(made):
    model = made()
    exact, found = logits_of(model), measure(model, "fp16", of(logits_of(made())))
    far = max(float(np.abs(a - b).max()) for a, b in zip(logits_of(model.cast(torch.float16)), exact, strict=True))
    assert (found.gap, found.fp8_caches) == (far, None)
    assert 0 < far < measure(made(), "bf16", of(exact)).gap


def test_fp8_caches_round_what_16_bits_computed(made):
    """A number near the middle of two of E4M3's steps goes either way, which is more than float16 moves it."""
    exact, scales = logits_of(made()), calibrate(made(), TEXTS)
    found, own = (measure(made(), "fp16", of(exact), each) for each in (scales, None))
    over = [cached_logits(model, TEXTS, scales) for model in (made(), made().cast(torch.float16))]
    assert found.gap == max(float(np.abs(a - b).max()) for a, b in zip(*over, strict=True))
    assert found.gap > 1.5 * own.gap
    assert found.fp8_caches is not None
    mean, most = found.fp8_caches["kl_nats_per_token"], found.fp8_caches["largest_kl_nats"]
    assert 0 < mean < most < 0.5
    halved = [kl(b, a) for a, b in zip(logits_of(made().cast(torch.float16)), exact, strict=True)]
    assert mean > float(np.concatenate(halved).mean())


def test_caches_that_make_another_model_of_it(made):
    model = made()
    scales = calibrate(model, TEXTS)
    with pytest.raises(ExecutionError, match=r"an FP8 cache changes this model too much, by .*, use --kv-cache-dtype"):
        measure(model, "fp16", of(logits_of(model)), Scales(scales.key, scales.value / 1000))
