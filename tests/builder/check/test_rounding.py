"""How far 16 bits and FP8 caches move a model's logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from specbuild.builder.check.rounding import measure
from specbuild.builder.frontend.reference import Reference, References, text_logits
from specbuild.builder.quantize.fp8_caches import Scales, cached_logits, calibrate
from specbuild.measure.divergence import kl
from specbuild.runtime.errors import ExecutionError

REFERENCES = [Reference([5, 17, 3, 88], [42, 9, 9, 61]), Reference([61, 4, 4], [8, 1]), Reference(list(range(40)), [0])]
TEXTS = [reference.text for reference in REFERENCES]


def logits_of(model: Any) -> list[np.ndarray]:
    return [text_logits(model, text) for text in TEXTS]


def of(logits: list[Any]) -> References:
    return References(REFERENCES, logits, 4)


def test_sixteen_bits_alone(make_model: Callable[..., Any]) -> None:
    model = make_model()
    exact, found = logits_of(model), measure(model, "fp16", of(logits_of(make_model())))
    far = max(float(np.abs(a - b).max()) for a, b in zip(logits_of(model), exact, strict=True))
    assert (found.gap, found.fp8_caches) == (far, None), "the model is in float16 now"
    assert 0 < far < measure(make_model(), "bf16", of(exact)).gap


def test_fp8_caches_round_what_16_bits_computed(make_model: Callable[..., Any]) -> None:
    """A number near the middle of two of E4M3's steps goes either way, which is more than float16 moves it."""
    exact, scales = logits_of(make_model()), calibrate(make_model(), TEXTS)
    found, own = (measure(make_model(), "fp16", of(exact), each) for each in (scales, None))
    over = [cached_logits(model, TEXTS, scales) for model in (make_model(), make_model().half())]
    assert found.gap == max(float(np.abs(a - b).max()) for a, b in zip(*over, strict=True))
    assert found.gap > 1.5 * own.gap
    assert found.fp8_caches is not None
    mean, most = found.fp8_caches["kl_nats_per_token"], found.fp8_caches["largest_kl_nats"]
    assert 0 < mean < most < 0.5
    halved = [kl(b, a) for a, b in zip(logits_of(make_model().half()), exact, strict=True)]
    assert mean > float(np.concatenate(halved).mean())


def test_caches_that_make_another_model_of_it(make_model: Callable[..., Any]) -> None:
    model = make_model()
    scales = calibrate(model, TEXTS)
    with pytest.raises(ExecutionError, match=r"an FP8 cache changes this model too much, by .*, use --kv-cache-dtype"):
        measure(model, "fp16", of(logits_of(model)), Scales(scales.key, scales.value / 1000))
