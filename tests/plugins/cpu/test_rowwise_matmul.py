"""RowwiseMatMul and RowwiseGather: what they compute, and that a row's bits are those of the row alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto

from specbuild.builder.lower.panels import pack_codes, pack_factors, pack_floats

ROWS = 70
FLOATS = {"scale_bits": 32, "minimum_bits": 0}


@dataclass
class Product:
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

    def session(self, operator, threads=2):
        inputs = {"x": (TensorProto.FLOAT, ["rows", self.codes.shape[1]]), "factors": None}
        inputs |= {name: (TensorProto.UINT8, each.shape) for name, each in self.feeds.items()}
        inputs = {name: inputs[name] for name in ("x", "codes", "factors")}
        return operator("RowwiseMatMul", inputs, threads, rounding=self.rounding, **self.attributes)

    def run(self, session, x):
        found = session.run(None, {"x": x} | self.feeds)
        return found


@st.composite
def products(draw):
    chance = np.random.default_rng(draw(st.integers(0, 2**32)))
    bits, rounding = draw(st.sampled_from([4, 5, 6, 8, 32])), draw(st.sampled_from([8, 16, 32]))
    block, columns = draw(st.sampled_from([16, 32, 64, 128][bits == 5 :])), draw(st.integers(1, 90))
    blocks = draw(st.integers(1, 1200 // block))
    shape = columns, block * blocks
    x = (chance.standard_normal((ROWS, shape[1])) * np.exp(chance.standard_normal((ROWS, 1)) * 4)).astype(np.float32)
    if bits == 32:
        return Product(bits, shape[1], 32, chance.standard_normal(shape, np.float32), [], 32, 0, x)
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
    return Product(bits, block, rounding, codes, factors, scale_bits, minimum_bits, x)


@pytest.mark.slow
@settings(max_examples=40)
@given(products(), st.integers(1, ROWS), st.integers(1, 3))
def test_a_rows_bits_are_those_of_the_row_alone(operator, drawn, at_once, threads):
    session = drawn.session(operator, threads)
    alone = [drawn.run(session, drawn.x[row : row + 1]) for row in range(ROWS)]
    together = [drawn.run(session, drawn.x[row : row + at_once]) for row in range(0, ROWS, at_once)]
    expected = np.concatenate([each[0] for each in alone])
    for results in (alone, together):
        for numbers in zip(*results, strict=True):  # of one set of instructions
            assert np.array_equal(np.concatenate(numbers), expected)


@settings(max_examples=40)
@given(products())
def test_products_are_those_of_the_rounded_numbers(operator, drawn):
    x = drawn.x.astype(np.float64)
    if drawn.rounding < 32:
        blocks = x.reshape(ROWS, -1, drawn.block)
        steps = np.abs(blocks).max(-1, keepdims=True) / ((1 << drawn.rounding - 1) - 1)
        x = (np.round(blocks / steps) * steps).reshape(x.shape)
    found = drawn.run(drawn.session(operator), drawn.x)[0]
    step = np.abs(x).max(-1, keepdims=True) / ((1 << drawn.rounding - 1) - 1)  # of a number that lies between two
    allowed = 1e-5 * np.abs(x) @ np.abs(drawn.weight).T + (drawn.rounding < 32) * step * np.abs(drawn.weight).max(-1)
    assert (np.abs(found - x @ drawn.weight.T) <= allowed).all()


@settings(max_examples=20)
@given(products())
def test_a_lookup_returns_the_weights_numbers(operator, drawn):
    ids = np.arange(len(drawn.codes))[::-1]
    inputs = {"ids": (TensorProto.INT64, ["n"])}
    inputs |= {name: (TensorProto.UINT8, each.shape) for name, each in drawn.feeds.items()}
    found = operator("RowwiseGather", inputs, **drawn.attributes).run(None, {"ids": ids} | drawn.feeds)[0]
    np.testing.assert_allclose(found, drawn.weight[ids], rtol=1e-6, atol=1e-6 * np.abs(drawn.weight).max())


def test_a_row_that_is_not_finite_leaves_its_neighbours_alone(operator):
    weight = np.ones((3, 64), np.float32)
    for bits, rounding in ((8, 8), (8, 16), (32, 32)):
        codes = weight if bits == 32 else np.full((3, 64), 129, np.uint8)
        scales = [np.ones((3, 2), np.float32)]
        drawn = Product(bits, 64 if bits == 32 else 32, rounding, codes, scales, 32, 0, weight[:1])
        x = np.stack([np.ones(64), np.full(64, np.inf), np.full(64, np.nan), np.zeros(64), np.full(64, 1e-38)])
        for found in drawn.run(drawn.session(operator), x.astype(np.float32)):
            np.testing.assert_allclose(found[[0, 3, 4], 0], [64, 0, 0], atol=1e-30)
            assert not np.isfinite(found[1:3]).any()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"bits": 7}, "bits must be"),
        ({"bits": 5, "block": 16}, "32 or more"),
        ({"scale_bits": 4}, "scale_bits must be"),
        ({"scale_bits": 8, "minimum_bits": 16}, "minimum_bits must be"),
        ({"block": 12}, "block must be"),
        ({"block": 256}, "block must be"),
        ({"inner": 48}, "whole blocks"),
        ({"inner": 1 << 40}, "too large"),
        ({"rounding": 7}, "rounding must be"),
    ],
)
def test_wrong_attributes_are_refused(operator, wrong, why):
    inputs = {"x": (1, [1, 64]), "codes": (2, [1, 1024]), "factors": (2, [1, 128])}
    attributes = {"inner": 64, "columns": 16, "bits": 8, "block": 32, "rounding": 8} | FLOATS | wrong
    with pytest.raises(Exception, match=why):
        operator("RowwiseMatMul", inputs, **attributes)


@pytest.mark.parametrize("wrong", ["codes", "factors"])
def test_weights_of_another_size_are_refused(operator, wrong):
    inputs = {"x": (1, [1, 64]), "codes": (2, ["n"]), "factors": (2, ["m"])}
    session = operator("RowwiseMatMul", inputs, inner=64, columns=16, bits=8, block=32, rounding=8, **FLOATS)
    feeds = {"codes": np.zeros(1024, np.uint8), "factors": np.zeros(128, np.uint8)} | {wrong: np.zeros(1000, np.uint8)}
    with pytest.raises(Exception, match=f"{wrong} are not as many"):
        session.run(None, {"x": np.zeros((1, 64), np.float32)} | feeds)
