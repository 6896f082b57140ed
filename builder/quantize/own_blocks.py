"""Precision `keep`: the weights of a GGUF file as the blocks that it holds, exactly, with inputs rounded to 16 bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from specbuild.builder.config.scheme import Scheme
from specbuild.builder.frontend.lazy_weights import Weight, check_finite

from .linears import Names
from .numbers import Quantized


@dataclass(frozen=True, eq=False)
class Kept:
    """A weight in blocks, which is read when it is written."""

    name: str
    weight: Weight

    smooth = None
    input_scale = None

    @property
    def scheme(self) -> Scheme:
        """The operator's scheme with the weight's blocks."""
        form = self.weight.format
        assert form is not None
        return Scheme(f"int{form.bits}", "fp32", form.block, not form.offset, "keep", "wide")

    @property
    def shape(self) -> tuple[int, int, int]:
        """How many rows there are, how many blocks a row has, and how many columns a block."""
        rows, columns = self.weight.shape
        return rows, columns // self.scheme.block, self.scheme.block

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of `Quantized`'s fields that have numbers."""
        return ("codes", "scales") if self.scheme.symmetric else ("codes", "scales", "zeros", "offsets")

    def whole(self) -> Quantized:
        """Return the weight with its numbers; raise CheckpointError if a scale is not finite."""
        found = self.weight.blocks()
        scales, offsets = torch.from_numpy(found.scales), None
        check_finite(self.name, scales)
        zeros = None
        if found.offsets is not None:
            offsets = torch.from_numpy(found.offsets)
            check_finite(self.name, offsets)
            zeros = torch.full(scales.shape, found.zero, dtype=torch.uint8)
        codes = torch.from_numpy(np.ascontiguousarray(found.codes))
        return Quantized(self.scheme, codes, scales, zeros, offsets=offsets)


Numbers = Quantized | Kept


def own_blocks(weights: Mapping[str, Weight], names: Names) -> dict[str, Kept]:
    """Return, by name, the weights that come in blocks; a tied head and embedding are one."""
    found = {name: weights[f"{name}.weight"] for name in names.weights if f"{name}.weight" in weights}
    if names.tied:
        found[str(names.head)] = found[names.embedding]
    kept = {id(weight): Kept(name, weight) for name, weight in found.items() if weight.format}
    return {name: kept[id(weight)] for name, weight in found.items() if id(weight) in kept}


def stored_bytes(weight: Weight) -> int:
    """Return how many bytes a weight takes in a bundle: its blocks, if it comes in them, else float32."""
    if weight.format is None or len(weight.shape) != 2:
        return 4 * prod(weight.shape)
    factors = 2 if weight.format.offset else 1
    return prod(weight.shape) * weight.format.bits // 8 + 4 * factors * prod(weight.shape) // weight.format.block


def told(weights: Mapping[str, Weight], kept: Mapping[str, Kept]) -> dict[str, Any]:
    """Return what a report says of kept weights: how many bits each takes, and how many have which form."""
    each = {id(weight): weight for weight in weights.values()}
    inside, forms = {id(one.weight): one.scheme for one in kept.values()}, Counter[str]()
    for key in each:
        scheme = inside.get(key)
        forms[str(scheme).partition(",keep")[0] if scheme else "fp32"] += 1
    stored, numbers = sum(map(stored_bytes, each.values())), sum(prod(weight.shape) for weight in each.values())
    return {"bits_per_weight": round(8 * stored / numbers, 3), "weights": dict(sorted(forms.items()))}
