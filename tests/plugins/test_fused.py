"""The fused operators around the matrix products, run on the host, against NumPy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention_oracle import NUMPY, rounded
from device import Array, HostKernels

from specbuild.runtime.backends.kernels.abi import Dtype, Fault, Gather, Norm, SwiGLU

DTYPES = [Dtype.F16, Dtype.BF16]
STEP = {Dtype.F16: 2.0**-10, Dtype.BF16: 2.0**-7}  # between neighbours, relative


def norm(
    kernels: HostKernels,
    x: Array,
    y: Array | None,
    weight: Array,
    dtype: Dtype,
    output: Dtype,
    change: dict[str, Any] | None = None,
) -> tuple[Array, Array, Array]:
    """The norm, the sum and the scales, poisoned before."""
    rows, width = x.shape
    out = np.full((rows, width), -1 if output == Dtype.INT8 else np.nan, dtype={**NUMPY, Dtype.INT8: np.int8}[output])
    total = np.full((rows, width), np.nan, dtype=x.dtype)
    scales = np.full(rows, np.nan, dtype=np.float32)
    params = Norm(epsilon=1e-5, rows=rows, width=width, dtype=dtype, output_dtype=output)
    for name, array in {"x": x, "y": y, "weight": weight, "sum": total, "output": out}.items():
        setattr(params, name, kernels.at(array))
    params.scales = kernels.at(scales) if output != dtype else None
    for name, value in (change or {}).items():
        setattr(params, name, value)
    kernels.launch("rms_norm", params)
    return out, total, scales


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 264, 4096])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("quantized", [None, Dtype.E4M3, Dtype.INT8])
def test_norm(kernels: HostKernels, dtype: Dtype, width: int, residual: bool, quantized: Dtype | None) -> None:
    rng = np.random.default_rng(width)
    x, y = (rounded(rng.normal(0, 3, (3, width)), dtype) for _ in range(2))
    weight = rng.uniform(0.5, 2, width).astype(np.float32)
    output, total, scales = norm(kernels, x, y if residual else None, weight, dtype, quantized or dtype)
    expected_sum = rounded(x.astype(np.float32) + y.astype(np.float32), dtype) if residual else x
    assert total.tobytes() == expected_sum.tobytes()
    exact = expected_sum.astype(np.float64)
    exact = exact / np.sqrt((exact**2).mean(1, keepdims=True) + 1e-5) * weight
    if quantized is None:
        assert np.abs(output.astype(np.float64) - exact).max() <= STEP[dtype] * np.abs(exact).max()
        return
    limit = 448 if quantized == Dtype.E4M3 else 127
    np.testing.assert_allclose(scales, np.abs(exact).max(1) / limit, rtol=1e-5)
    error = np.abs(output.astype(np.float64) * scales[:, None] - exact)
    step = np.maximum(np.abs(exact) * 2.0**-4, scales[:, None]) if quantized == Dtype.E4M3 else 0.5001 * scales[:, None]
    assert (error <= step * 1.001).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", [True, False])
def test_swiglu(kernels: HostKernels, dtype: Dtype, packed: bool) -> None:
    rng = np.random.default_rng(0)
    both = rounded(rng.normal(0, 4, (5, 2, 264)), dtype)
    both[0, 0, :2] = (-60000, 60000) if dtype == Dtype.F16 else (-3e38, 3e38)
    gate, up = both[:, 0], both[:, 1]
    if not packed:
        gate, up = gate.copy(), up.copy()
    output = np.full((5, 264), np.nan, dtype=both.dtype)
    kernels.launch(
        "swiglu_gate",
        SwiGLU(
            gate=kernels.at(gate),
            up=kernels.at(up),
            output=kernels.at(output),
            stride=528 if packed else 264,
            rows=5,
            width=264,
            dtype=dtype,
        ),
    )
    g, u = gate.astype(np.float64), up.astype(np.float64)
    with np.errstate(over="ignore"):
        exact = rounded(g / (1 + np.exp(-g)) * u, dtype).astype(np.float64)
    assert np.isfinite(output[1:].astype(np.float32)).all()
    close = np.isclose(output.astype(np.float64), exact, rtol=STEP[dtype], atol=1e-6)
    assert close.all()


def test_gather(kernels: HostKernels) -> None:
    table = np.random.default_rng(0).integers(0, 256, (7, 48), dtype=np.uint8)
    ids, output, fault = np.array([6, 0, 3, 3], np.int32), np.full((4, 48), 255, np.uint8), np.zeros(1, np.int32)

    def gather() -> None:
        params = Gather(
            table=kernels.at(table), ids=kernels.at(ids), output=kernels.at(output), fault=kernels.at(fault)
        )
        params.rows, params.vocab, params.row_bytes = len(ids), *table.shape
        kernels.launch("gather_rows", params)

    gather()
    assert (output == table[ids]).all()
    assert fault[0] == Fault.NONE
    ids[1:3] = 7, -1
    gather()
    assert not output[1:3].any()
    assert (output[[0, 3]] == table[[6, 3]]).all()
    assert fault[0] == Fault.TOKEN
