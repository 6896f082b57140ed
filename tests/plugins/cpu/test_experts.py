"""Products of rows with the weights of their experts: those of each weight alone, whatever rows are beside them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from specbuild.builder.lower.panels import pack_codes, pack_factors, pack_floats


@settings(max_examples=25)
@given(st.data())
def test_a_rows_product_is_that_with_its_experts_weight(operator, data):
    chance = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    experts, columns, rows, chosen = (data.draw(st.integers(1, most)) for most in (5, 40, 9, 3))
    bits, inner = data.draw(st.sampled_from([4, 8, 32])), 32 * data.draw(st.integers(1, 3))
    x = chance.standard_normal((rows, inner)).astype(np.float32)
    which = chance.integers(0, experts, (rows, chosen))
    parts = [packed(chance, bits, columns, inner) for _ in range(experts)]
    attributes = {"inner": inner, "columns": columns, "bits": bits, "block": inner if bits == 32 else 32}
    attributes |= {"scale_bits": 32, "minimum_bits": 0 if bits == 32 else 32}
    attributes |= {"rounding": 32 if bits == 32 else data.draw(st.sampled_from([8, 16, 32]))}
    weights = {name: np.stack([each[name] for each in parts]) for name in parts[0]}
    (found, *_) = run(operator, attributes, x, weights, which)
    assert found.shape == (rows * chosen, columns)
    for row in range(rows):
        for at in range(chosen):
            (alone, *_) = run(operator, attributes, x[row : row + 1], parts[which[row, at]])
            assert np.array_equal(found[row * chosen + at], alone[0])


def test_an_expert_that_is_not_there_is_an_error(operator):
    weights = {name: each[None] for name, each in packed(np.random.default_rng(0), 8, 16, 32).items()}
    attributes = {
        "inner": 32,
        "columns": 16,
        "bits": 8,
        "block": 32,
        "rounding": 8,
        "scale_bits": 32,
        "minimum_bits": 32,
    }
    for wrong in (1, -1):
        with pytest.raises(Exception, match="there is no such expert"):
            run(operator, attributes, np.ones((1, 32), np.float32), weights, np.array([[wrong]]))


def packed(chance, bits, columns, inner):
    if bits == 32:
        return {"codes": pack_floats(chance.standard_normal((columns, inner)).astype(np.float32))}
    codes = chance.integers(0, 1 << bits, (columns, inner)).astype(np.uint8)
    factors = chance.random((2, columns, inner // 32)).astype(np.float32)
    return {"codes": pack_codes(codes, bits), "factors": pack_factors(32, *factors)}


def run(operator, attributes, x, weights, which=None):
    feeds = {"x": x, "codes": weights["codes"], "factors": weights.get("factors")}
    feeds |= {} if which is None else {"experts": which}
    types = {"codes": TensorProto.UINT8, "factors": TensorProto.UINT8, "experts": TensorProto.INT64}
    inputs = {
        name: None if each is None else (types.get(name, TensorProto.FLOAT), [None] * each.ndim)
        for name, each in feeds.items()
    }
    session = operator("RowwiseMatMul", inputs, **attributes)
    return session.run(None, {name: each for name, each in feeds.items() if each is not None})
