"""FP8 (E4M3) KV caches: calibrates a scale per KV head on the check's texts, and simulates a model over such caches.

Both use `transformers`' attention interface. What a layer passes to it, keys normed and rotated, is what its cache
holds; for the simulation it is rounded as the cache would round it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specbuild.builder.frontend.layer_by_layer import LayeredModel
from specbuild.builder.frontend.logits_file import LogitsFile

ATTENTION = "specbuild_cached"
LARGEST = 448.0  # E4M3's largest number
MARGIN = 2.0  # headroom for texts with larger values than the check's; values beyond it saturate
LEAST = 2.0**-24  # keeps the scale positive for a head that was 0 on every text
_Keep = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Scales:
    """The factors of cached numbers: `float32[layers, Hkv]` for keys and for values."""

    key: NDArray[np.float32]
    value: NDArray[np.float32]

    def to_dict(self) -> dict[str, list[list[float]]]:
        """Return the scales as report.json has them."""
        return {"key": self.key.tolist(), "value": self.value.tolist()}


def calibrate(model: LayeredModel, texts: Sequence[Sequence[int]]) -> Scales:
    """Return scales with which each head's largest value on these texts is 1/MARGIN of E4M3's largest number."""
    largest: dict[int, Tensor] = {}  # [2, Hkv] by layer

    def note(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        peak = torch.stack([x.float().abs().amax(dim=(0, 2, 3)) for x in (key, value)])
        largest[layer] = torch.maximum(peak, largest.get(layer, peak))
        return key, value

    with _with_keep(model.net, note):
        model.logits(texts)
    key, value = torch.stack([largest[layer] for layer in sorted(largest)], dim=1)
    return Scales(*((peak * (MARGIN / LARGEST)).clamp(min=LEAST).numpy() for peak in (key, value)))


def cached_logits(model: LayeredModel, texts: Sequence[Sequence[int]], scales: Scales | None) -> LogitsFile:
    """Return the logits after each token of each text, `float32[T, V]`, over E4M3 caches with these scales.

    With `scales` None, caches have the model's own type.
    """
    if scales is None:
        return model.logits(texts)
    keys, values = (torch.from_numpy(each)[:, :, None, None] for each in (scales.key, scales.value))
    with _with_keep(model.net, lambda layer, key, value: (_cached(key, keys[layer]), _cached(value, values[layer]))):
        return model.logits(texts)


def _cached(x: Tensor, scale: Tensor) -> Tensor:
    """Round `x [B, Hkv, N, D]` as an E4M3 cache does; `scale [Hkv, 1, 1]`."""
    return ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)  # the cast saturates


_keep: _Keep | None = None


@contextmanager
def _with_keep(model: PreTrainedModel, keep: _Keep) -> Iterator[None]:
    """Make each layer attend to the result of `keep(layer, key, value)`; restore the model afterwards."""
    global _keep
    before, _keep = model.config._attn_implementation, keep
    try:
        model.set_attn_implementation(ATTENTION)
        yield
    finally:
        model.set_attn_implementation(before)
        _keep = None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute eager attention over `_keep`'s keys and values; `attention_layout.probe` refused all other options."""
    assert _keep is not None, "runs inside _with_keep only"
    layer: int = module.layer_idx  # type: ignore[assignment]
    group = query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in _keep(layer, key, value))
    scores = query @ keys.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    weights = (scores + mask).softmax(-1, dtype=torch.float32).to(query.dtype)
    return (weights @ values).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, eager_mask)
