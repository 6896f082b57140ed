"""Weights in blocks, as they are packed for a CPU and for a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from specbuild.builder.lower.panels import pack_codes, pack_factors, pack_floats

ROWS = 70


@dataclass
class BlockWeight:
    """A drawn weight, and inputs for it."""

    bits: int
    block: int
    rounding: int
    codes: NDArray[Any]  # [N, K]: uint8, or the weight itself in float32
    factors: list[NDArray[Any]]  # [N, …], as they are packed
    scale_bits: int
    minimum_bits: int
    x: NDArray[np.float32]  # [ROWS, K]

    @property
    def attributes(self):
        columns, inner = self.codes.shape
        factors = {"scale_bits": self.scale_bits, "minimum_bits": self.minimum_bits}
        return {"inner": inner, "columns": columns, "bits": self.bits, "block": self.block} | factors

    @property
    def feeds(self):
        if self.bits == 32:
            return {"codes": pack_floats(self.codes)}
        return {"codes": pack_codes(self.codes, self.bits), "factors": pack_factors(self.block, *self.factors)}

    @property
    def weight(self):
        if self.bits == 32:
            return self.codes.astype(np.float64)
        scales, *others = (each.astype(np.float64) for each in self.factors)
        minima = others.pop(0) if self.minimum_bits else None
        if self.scale_bits == 8:
            scales, *others = scales * self._by_block(others[0]), *others[1:]
        if self.minimum_bits == 8:
            minima = minima * (self._by_block(others[0]) if self.scale_bits == 8 else scales)
        blocks = self.codes.reshape(*scales.shape, self.block) - (0 if self.minimum_bits else float(1 << self.bits - 1))
        blocks = blocks * scales[..., None] - (0 if minima is None else minima[..., None])
        return blocks.reshape(self.codes.shape)

    def _by_block(self, steps):
        return np.repeat(steps, 256 // self.block, axis=1)[:, : self.codes.shape[1] // self.block]


@st.composite
def block_weights(draw, all_bits=(4, 5, 6, 8, 32)):
    chance = np.random.default_rng(draw(st.integers(0, 2**32)))
    bits, rounding = draw(st.sampled_from(all_bits)), draw(st.sampled_from([8, 16, 32]))
    block, columns = draw(st.sampled_from([16, 32, 64, 128][bits == 5 :])), draw(st.integers(1, 90))
    blocks = draw(st.integers(1, 1200 // block))
    shape = columns, block * blocks
    x = (chance.standard_normal((ROWS, shape[1])) * np.exp(chance.standard_normal((ROWS, 1)) * 4)).astype(np.float32)
    if bits == 32:
        return BlockWeight(bits, shape[1], 32, chance.standard_normal(shape, np.float32), [], 32, 0, x)
    forms = [(32, 0), (32, 32), (16, 0), (16, 16), (32, 8), (16, 8), (8, 0), (8, 8)]
    scale_bits, minimum_bits = draw(st.sampled_from(forms))
    types = {8: np.int8, 16: np.float16, 32: np.float32}
    widths = [each for each in (scale_bits, minimum_bits) if each]
    drawn = [chance.standard_normal((columns, blocks)) * (20 if each == 8 else 1) for each in widths]
    factors = [each.clip(-128, 127).astype(types[width]) for each, width in zip(drawn, widths, strict=True)]
    if scale_bits == 8:
        steps = columns, -(-shape[1] // 256)
        factors += [chance.random(steps, np.float32) for _ in range(1 + (minimum_bits == 8))]
    codes = chance.integers(0, 1 << bits, shape, np.uint8)
    return BlockWeight(bits, block, rounding, codes, factors, scale_bits, minimum_bits, x)
