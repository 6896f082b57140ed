"""Products with weights in blocks: what the kernels compute, and that a row's bits are those of the row alone."""

import ml_dtypes
import numpy as np
from block_weights import block_weights
from calls import DTYPES, struct
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.runtime.backends.kernels.abi import Product


def product(kernels, drawn, x):
    output = np.full((len(x), len(drawn.codes)), 77, dtype=x.dtype)
    sizes = drawn.attributes | {"rows": len(x), "dtype": DTYPES[x.dtype]}
    kernels.launch("block_product", struct(kernels, Product, input=x, output=output, **drawn.feeds, **sizes))
    return output


@settings(max_examples=25)
@given(
    drawn=block_weights((4, 5, 6, 8)),
    dtype=st.sampled_from([np.float16, ml_dtypes.bfloat16]),
    rows=st.integers(1, 70),
)
def test_anything(kernels, drawn, dtype, rows):
    x = np.clip(drawn.x[:rows], -99, 99).astype(dtype)
    found = product(kernels, drawn, x).astype(np.float64)
    exact, weight = x.astype(np.float64), drawn.weight
    scale = np.abs(exact).sum(-1, keepdims=True) * np.abs(weight).max()
    rounding = float(ml_dtypes.finfo(dtype).eps) * np.abs(found)
    assert (np.abs(found - exact @ weight.T) <= rounding + 1e-5 * scale + 1e-7).all()
    assert np.array_equal(product(kernels, drawn, x[-1:].copy()), found[-1:].astype(dtype))
