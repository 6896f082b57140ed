"""GGUF's blocks: what is decoded gives the very numbers that ggml's own dequantization gives."""

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbuild.builder.frontend.gguf_blocks import FORMATS, decode


@pytest.mark.parametrize("kind", FORMATS)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 3), blocks=st.integers(1, 3))
def test_any_bytes_give_the_numbers_of_ggml(kind, seed, rows, blocks):
    """Whatever a file holds, but for scales that are no numbers."""
    quantized = gguf.GGMLQuantizationType[kind]
    _, size = gguf.GGML_QUANT_SIZES[quantized]
    raw = np.random.default_rng(seed).integers(0, 256, (rows, blocks * size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        exact = gguf.quants.dequantize(raw, quantized)
        found = decode(kind, raw)
        numbers = found.scales.floats[..., None] * (found.codes.astype(np.float32) - found.zero)
        if found.offsets is not None:
            numbers += found.offsets.floats[..., None]
    np.testing.assert_array_equal(numbers.reshape(rows, -1), exact)


@pytest.mark.parametrize("kind", FORMATS)
def test_codes_and_factors_fit_their_bits_and_blocks_have_one_size(kind):
    quantized, form = gguf.GGMLQuantizationType[kind], FORMATS[kind]
    block, size = gguf.GGML_QUANT_SIZES[quantized]
    raw = np.random.default_rng(0).integers(0, 256, (2, 3 * size), dtype=np.uint8)
    found = decode(kind, raw)
    assert found.codes.shape == (2, 3 * block // form.block, form.block)
    assert found.codes.max() < 1 << form.bits
    assert (found.offsets is not None) == form.offset
    for factors in (found.scales, found.offsets or found.scales):
        assert factors.floats.shape == found.codes.shape[:2]
        narrow = factors.numbers.astype(np.int8 if form.factor_bits == 8 else np.float16)
        np.testing.assert_array_equal(narrow.astype(np.float32), factors.numbers)
        assert (factors.steps is not None) == (form.factor_bits == 8)
