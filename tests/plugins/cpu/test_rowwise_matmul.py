"""RowwiseMatMul and RowwiseGather: what they compute, and that a row's bits are those of the row alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from block_weights import ROWS, BlockWeight, block_weights
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

FLOATS = {"scale_bits": 32, "minimum_bits": 0}


def session_of(operator, drawn, threads=2, around=(), **attributes):
    inputs = {"x": (TensorProto.FLOAT, ["rows", drawn.codes.shape[1]])}
    inputs |= {name: (TensorProto.UINT8, each.shape) for name, each in drawn.feeds.items()}
    inputs |= {name: (TensorProto.FLOAT, ["rows", "n"] if name == "residual" else ["n"]) for name in around}
    inputs = {name: inputs.get(name) for name in ("x", "codes", "factors", "experts", "norm", "bias", "residual")}
    return operator("RowwiseMatMul", inputs, threads, rounding=drawn.rounding, **drawn.attributes, **attributes)


def run(session, drawn, x, **around):
    return session.run(None, {"x": x} | drawn.feeds | around)


def near(found, drawn, x):
    """Whether products are those of the rounded rows, but for a number that lies between two."""
    x, limit = x.astype(np.float64), (1 << drawn.rounding - 1) - 1
    step = np.abs(x).max(-1, keepdims=True) / limit
    if drawn.rounding < 32:
        blocks = x.reshape(ROWS, -1, drawn.block)
        steps = np.abs(blocks).max(-1, keepdims=True) / limit
        x = (np.round(blocks / steps) * steps).reshape(x.shape)
    allowed = 1e-5 * np.abs(x) @ np.abs(drawn.weight).T + (drawn.rounding < 32) * step * np.abs(drawn.weight).max(-1)
    return (np.abs(found - x @ drawn.weight.T) <= allowed).all()


@pytest.mark.slow
@settings(max_examples=40)
@given(block_weights(), st.integers(1, ROWS), st.integers(1, 3))
def test_a_rows_bits_are_those_of_the_row_alone(operator, drawn, at_once, threads):
    session = session_of(operator, drawn, threads)
    alone = [run(session, drawn, drawn.x[row : row + 1]) for row in range(ROWS)]
    together = [run(session, drawn, drawn.x[row : row + at_once]) for row in range(0, ROWS, at_once)]
    expected = np.concatenate([each[0] for each in alone])
    for results in (alone, together):
        for numbers in zip(*results, strict=True):  # of one set of instructions
            assert np.array_equal(np.concatenate(numbers), expected)


@settings(max_examples=40)
@given(block_weights())
def test_products_are_those_of_the_rounded_numbers(operator, drawn):
    assert near(run(session_of(operator, drawn), drawn, drawn.x)[0], drawn, drawn.x)


@settings(max_examples=30)
@given(block_weights(), st.sets(st.sampled_from(["norm", "bias", "residual"])), st.booleans(), st.integers(0, ROWS - 1))
def test_what_stands_around_a_product_is_computed_with_it(operator, drawn, names, gated, row):
    chance, half = np.random.default_rng(row), len(drawn.codes) // 32 * 16
    if gated := gated and half > 0:
        names -= {"residual"}
        drawn = replace(drawn, codes=drawn.codes[: 2 * half], factors=[each[: 2 * half] for each in drawn.factors])
    columns, inner = drawn.codes.shape
    shapes = {"norm": inner, "bias": columns, "residual": (ROWS, columns)}
    around = {name: chance.standard_normal(shapes[name], np.float32) for name in names}
    session = session_of(operator, drawn, 2, around, epsilon=0.5, gated=int(gated))
    found = run(session, drawn, drawn.x, **around)
    of_row = around | ({"residual": around["residual"][row : row + 1]} if "residual" in names else {})
    for numbers, alone in zip(found, run(session, drawn, drawn.x[row : row + 1], **of_row), strict=True):
        assert np.array_equal(numbers, found[0])
        assert np.array_equal(alone[0], numbers[row])
    x, before = drawn.x, {name: around[name] for name in {"norm"} & names}
    if before:
        x = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 0.5) * around["norm"]
    expected = run(session_of(operator, drawn, 2, before, epsilon=0.5), drawn, drawn.x, **before)[0]
    assert near(expected, drawn, x)
    for name in ("bias", "residual"):
        expected = expected + around.get(name, np.float32(0))
    if gated:
        gate, up = np.split(expected.astype(np.float64), 2, axis=1)
        expected = gate / (1 + np.exp(-gate.clip(-700))) * up
    np.testing.assert_allclose(found[0], expected, rtol=1e-5, atol=1e-30)


@settings(max_examples=20)
@given(block_weights())
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
        drawn = BlockWeight(bits, 64 if bits == 32 else 32, rounding, codes, scales, 32, 0, weight[:1])
        x = np.stack([np.ones(64), np.full(64, np.inf), np.full(64, np.nan), np.zeros(64), np.full(64, 1e-38)])
        for found in run(session_of(operator, drawn), drawn, x.astype(np.float32)):
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
