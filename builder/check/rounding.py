"""How far 16 bits and FP8 caches move a model's logits, measured in PyTorch on the check's texts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from specbuild.builder.frontend.reference import References
from specbuild.builder.quantize.fp8_caches import Scales, cached_logits
from specbuild.measure.divergence import divergences

from .bundle_check import FP8_CACHE, check_divergence

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Rounding:
    """By how much logits differ at most, and what FP8 caches alone change in float32, nats a token."""

    gap: float
    fp8_caches: dict[str, float] | None


def measure(model: PreTrainedModel, precision: str, references: References, scales: Scales | None = None) -> Rounding:
    """A float32 model's rounding, which is of `precision` afterwards; with `scales` over caches in E4M3.

    Such caches round what 16 bits computed, so a number near the middle of two steps goes either way: the same caches
    are in float32 what 16 bits are held against. Raises
    ExecutionError where 16 bits or the caches make another model of it.
    """
    texts, logits = references.texts, references.logits
    exact, moved = logits, None
    if scales is not None:
        exact = cached_logits(model, texts, scales)
        each = divergences(logits, exact)
        moved = {"kl_nats_per_token": check_divergence(FP8_CACHE, exact, logits), "largest_kl_nats": float(each.max())}
    rounded = cached_logits(model.to(DTYPES[precision]), texts, scales)
    gap = max(float(np.abs(a - b).max()) for a, b in zip(rounded, exact, strict=True))
    check_divergence(precision, rounded, logits)
    return Rounding(gap, moved)
