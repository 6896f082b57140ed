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
from specbuild.builder.frontend.gguf_blocks import Factors
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
        kind = f"int{form.bits}"
        return Scheme(kind, "fp32", form.block, not form.offset, KEEP, self.activations, scale_bits=form.factor_bits)

    @property
    def row_bytes(self) -> int:
        """The bytes of a row in a bundle."""
        return self.scheme.row_bytes(self.weight.shape[1], not self.scheme.symmetric)

    @property
    def shape(self) -> tuple[int, int, int]:  # type: ignore[override]
        """See Numbers."""
        rows, columns = self.weight.shape
        return rows, columns // self.scheme.block, self.scheme.block

    @property
    def parts(self) -> tuple[str, ...]:  # type: ignore[override]
        """See Numbers."""
        offset = () if self.scheme.symmetric else ("zeros", "offsets")
        steps = ("scale_steps", "offset_steps")[: 1 + bool(offset)] if self.scheme.scale_bits == 8 else ()
        return "codes", "scales", *offset, *steps

    def whole(self, rows: Rows = ALL) -> Quantized:
        """See Numbers; raises CheckpointError if a scale is not finite."""
        numbers = self.weight.blocks(rows)
        parts: dict[str, Any] = self._factors("scale", numbers.scales)
        if numbers.offsets is not None:
            parts |= self._factors("offset", numbers.offsets)
            parts["zeros"] = torch.full(parts["scales"].shape, numbers.zero, dtype=torch.uint8)
        return Quantized(self.scheme, torch.from_numpy(np.ascontiguousarray(numbers.codes)), **parts)

    def _factors(self, name: str, factors: Factors) -> dict[str, torch.Tensor]:
        """Return scales or offsets, and their steps if they have some, by their names in Quantized."""
        numbers = torch.from_numpy(np.ascontiguousarray(factors.numbers))
        steps = {} if factors.steps is None else {f"{name}_steps": torch.from_numpy(factors.steps)}
        check_finite(self.name, steps.get(f"{name}_steps", numbers))
        return {f"{name}s": numbers} | steps


def own_blocks(
    weights: Mapping[str, Weight], names: Names, activations: str = "wide", schemes: Mapping[str, Scheme] | None = None
) -> dict[str, OwnBlocks]:
    """Return, by name, the weights that come in blocks; a tied head and embedding are one.

    With `schemes` only those whose scheme has blocks in float32 with at least as many bits, with its activations.
    """
    every = Scheme("int8", "fp32", 32, activations=activations)
    quantizable = {name: weights[f"{name}.weight"] for name in names.weights if f"{name}.weight" in weights}
    each_once, blocks = dict[tuple[int, str], OwnBlocks](), dict[str, OwnBlocks]()
    for name, weight in quantizable.items():
        scheme = schemes.get(name) if schemes is not None else every
        holds = scheme and scheme.block and scheme.dtype == "fp32"
        if scheme and holds and weight.format and weight.format.bits <= scheme.bits:
            key = id(weight), scheme.activations
            blocks[name] = each_once.setdefault(key, OwnBlocks(name, weight, scheme.activations))
    return blocks


def block_report(weights: Mapping[str, Weight], blocks: Mapping[str, OwnBlocks]) -> dict[str, Any]:
    """Return what a report says of kept weights: how many bits each takes, and how many have which form."""
    each = {id(weight): weight for weight in weights.values()}
    inside, forms = {id(one.weight): one.scheme for one in blocks.values()}, Counter[str]()
    for key in each:
        scheme = inside.get(key)
        forms[str(scheme).partition(",keep")[0] if scheme else "fp32"] += 1
    rows = {id(one.weight): one.row_bytes for one in blocks.values()}
    stored = sum(w.shape[0] * rows[key] if key in rows else 4 * prod(w.shape) for key, w in each.items())
    numbers = sum(prod(weight.shape) for weight in each.values())
    return {"bits_per_weight": round(8 * stored / numbers, 3), "weights": dict(sorted(forms.items()))}
