"""Precision `keep`: the weights of a GGUF file as the blocks that it holds, exactly, with inputs rounded to 16 bits."""

from __future__ import annotations

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


def told(weights: Mapping[str, Weight], kept: Mapping[str, Kept]) -> dict[str, Any]:
    """Return what a report says of kept weights: bits of each as stored, and how many have which form."""
    stored, numbers, forms = 0, 0, dict[str, int]()
    inside = {id(each.weight): each for each in kept.values()}
    for weight in {id(each): each for each in weights.values()}.values():
        count, each = prod(weight.shape), inside.get(id(weight))
        bits, form = 32.0, "fp32"
        if each:
            factors = 1 if each.scheme.symmetric else 2
            bits = each.scheme.bits + 32 * factors / each.scheme.block
            form = f"int{each.scheme.bits}:{each.scheme.block},{'sym' if each.scheme.symmetric else 'asym'}"
        stored, numbers, forms[form] = stored + int(bits * count), numbers + count, forms.get(form, 0) + 1
    return {"bits_per_weight": round(stored / numbers, 3), "weights": dict(sorted(forms.items()))}
