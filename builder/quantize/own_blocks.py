"""Precision `keep`: the weights of a GGUF file as the blocks that it holds, exactly, with inputs rounded to 16 bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from specbuild.builder.config.scheme import KEEP, Scheme
from specbuild.builder.frontend.lazy_weights import ALL, Rows, Weight, check_finite

from .linears import Names
from .numbers import Numbers, Quantized


@dataclass(frozen=True, eq=False)
class OwnBlocks(Numbers):
    """A weight in the blocks of its file, which is read when it is written; `activations` are those of a scheme."""

    name: str
    weight: Weight
    activations: str = "wide"

    @property
    def scheme(self) -> Scheme:  # type: ignore[override]
        """The operator's scheme with the weight's blocks."""
        form = self.weight.format
        assert form is not None
        return Scheme(f"int{form.bits}", "fp32", form.block, not form.offset, KEEP, self.activations)

    @property
    def shape(self) -> tuple[int, int, int]:  # type: ignore[override]
        """See Numbers."""
        rows, columns = self.weight.shape
        return rows, columns // self.scheme.block, self.scheme.block

    @property
    def parts(self) -> tuple[str, ...]:  # type: ignore[override]
        """See Numbers."""
        return ("codes", "scales") if self.scheme.symmetric else ("codes", "scales", "zeros", "offsets")

    def whole(self, rows: Rows = ALL) -> Quantized:
        """See Numbers; raises CheckpointError if a scale is not finite."""
        found = self.weight.blocks(rows)
        scales, offsets = torch.from_numpy(found.scales), None
        check_finite(self.name, scales)
        zeros = None
        if found.offsets is not None:
            offsets = torch.from_numpy(found.offsets)
            check_finite(self.name, offsets)
            zeros = torch.full(scales.shape, found.zero, dtype=torch.uint8)
        codes = torch.from_numpy(np.ascontiguousarray(found.codes))
        return Quantized(self.scheme, codes, scales, zeros, offsets=offsets)


def own_blocks(
    weights: Mapping[str, Weight], names: Names, schemes: Mapping[str, Scheme] | None = None
) -> dict[str, OwnBlocks]:
    """Return, by name, the weights that come in blocks; a tied head and embedding are one.

    With `schemes` only those whose scheme has at least as many bits, with the scheme's activations.
    """
    found = {name: weights[f"{name}.weight"] for name in names.weights if f"{name}.weight" in weights}
    made, kept = dict[tuple[int, str], OwnBlocks](), dict[str, OwnBlocks]()
    for name, weight in found.items():
        scheme = schemes.get(name) if schemes is not None else _ANY
        if scheme and weight.format and weight.format.bits <= scheme.bits:
            key = id(weight), scheme.activations
            kept[name] = made.setdefault(key, OwnBlocks(name, weight, scheme.activations))
    return kept


_ANY = Scheme("int8", "fp32", activations="wide")


def stored_bytes(weight: Weight) -> int:
    """Return how many bytes a weight takes in a bundle: its blocks, if it comes in them, else float32."""
    if weight.format is None or len(weight.shape) != 2:
        return 4 * prod(weight.shape)
    factors = 2 if weight.format.offset else 1
    return prod(weight.shape) * weight.format.bits // 8 + 4 * factors * prod(weight.shape) // weight.format.block


def told(weights: Mapping[str, Weight], kept: Mapping[str, OwnBlocks]) -> dict[str, Any]:
    """Return what a report says of kept weights: how many bits each takes, and how many have which form."""
    each = {id(weight): weight for weight in weights.values()}
    inside, forms = {id(one.weight): one.scheme for one in kept.values()}, Counter[str]()
    for key in each:
        scheme = inside.get(key)
        forms[str(scheme).partition(",keep")[0] if scheme else "fp32"] += 1
    stored, numbers = sum(map(stored_bytes, each.values())), sum(prod(weight.shape) for weight in each.values())
    return {"bits_per_weight": round(8 * stored / numbers, 3), "weights": dict(sorted(forms.items()))}
