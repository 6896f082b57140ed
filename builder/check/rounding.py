"""Measures in PyTorch, on the check's texts, how far 16 bits and FP8 caches move a model's logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from specbuild.builder.frontend.layer_by_layer import LayeredModel
from specbuild.builder.quantize.fp8_caches import Scales, cached_logits
from specbuild.builder.quantize.quality import Before
from specbuild.measure.divergence import divergences

from .bundle_check import FP8_CACHE, check_divergence

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Rounding:
    """The largest difference of logits by 16 bits, and the nats per token that FP8 caches alone cost in float32."""

    gap: float
    fp8_caches: dict[str, float] | None


def measure(model: LayeredModel, precision: str, references: Before, scales: Scales | None = None) -> Rounding:
    """Measure what `precision` and FP8 caches change in a model.

    FP8 caches round what 16 bits computed, so a number near the middle of two steps may go either way. 16 bits are
    therefore compared with float32 over the same caches.

    Args:
        model: The model in float32.
        precision: A key of DTYPES.
        references: The model's texts and float32 logits.
        scales: Scales of FP8 (E4M3) caches; None if the caches have the model's type.

    Raises:
        ExecutionError: 16 bits or the caches change the model too much.
    """
    texts, logits = references.texts, references.logits
    exact, moved = logits, None
    if scales is not None:
        exact = cached_logits(model, texts, scales)
        each = divergences(logits, exact)
        moved = {"kl_nats_per_token": check_divergence(FP8_CACHE, exact, logits), "largest_kl_nats": float(each.max())}
    rounded = cached_logits(model.cast(DTYPES[precision]), texts, scales)
    gap = max(float(np.abs(a - b).max()) for a, b in zip(rounded, exact, strict=True))
    check_divergence(precision, rounded, logits)
    return Rounding(gap, moved)
