"""The numbers of a weight: within half a step, GPTQ, AWQ and SmoothQuant for the better, and never NaN."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from specbuild.builder.config.scheme import Scheme
from specbuild.builder.quantize.numbers import SPAN, Inputs, Quantized, fit, quantize

INT8 = Scheme("int8", "fp32", 32)
INT4 = Scheme("int4", "fp32", 32)
FP8 = Scheme("fp8", "fp32", activations="static")
STATIC = Scheme("int8", "fp32", activations="static")
METHODS = {"rtn": INT4, "gptq": replace(INT4, method="gptq"), "awq": replace(INT4, method="awq")}
DEGENERATE = [Scheme("int4", "fp32", 16, symmetric, method) for method in METHODS for symmetric in (True, False)]
DEGENERATE += [replace(METHODS["awq"], block=64), STATIC, FP8, replace(FP8, per_tensor=True)]
RESOLUTION = {"fp32": 0.0, "fp16": 2**-11, "bf16": 2**-8}


def seen(x: Tensor) -> Inputs:
    flat = x.reshape(-1, x.shape[-1])
    return Inputs(flat.abs().amax(0), [flat.T @ flat])


def one(weight: Tensor, scheme: Scheme, inputs: Inputs | None = None) -> Quantized:
    return quantize({"w": weight}, scheme, inputs)["w"]


def computed(found: Quantized, x: Tensor) -> Tensor:
    return found.seen(x) @ found.restored().T


def output_error(weight: Tensor, found: Quantized, x: Tensor) -> float:
    exact = x @ weight.T
    return float((computed(found, x) - exact).norm() / exact.norm())


def correlated(rows: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, columns // 8, generator=generator)
    mixed = hidden @ torch.randn(columns // 8, columns, generator=generator)
    return mixed + 0.1 * torch.randn(rows, columns, generator=generator)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def biased(rows: int, columns: int) -> Tensor:
    """Inputs some of whose columns are far larger than others."""
    return normal(rows, columns, seed=3) * torch.logspace(-2, 1, columns)[torch.randperm(columns)]


@settings(deadline=None, derandomize=True)
@given(
    rows=arrays(np.float32, (3, 64), elements=st.floats(-1e4, 1e4, width=32)),
    kind=st.sampled_from(["int8", "int4"]),
    size=st.sampled_from([16, 32, 64, 0]),
    symmetric=st.booleans(),
    dtype=st.sampled_from(["fp32", "fp16", "bf16"]),
)
def test_numbers_are_within_half_a_step(rows: np.ndarray, kind: str, size: int, symmetric: bool, dtype: str) -> None:
    """And a zero is a zero."""
    rows[:, 0] = 0
    weight = torch.from_numpy(rows)
    found = one(weight, Scheme(kind, dtype, size, symmetric))
    blocks = 64 // (size or 64)
    assert (found.codes.shape, found.codes.dtype) == ((3, blocks, 64 // blocks), torch.uint8)
    assert int(found.codes.max()) < 1 << found.scheme.bits
    assert found.scales.shape == (3, blocks)
    assert (found.zeros is None) is symmetric
    assert not found.restored()[:, 0].any()
    steps = found.scales.double().repeat_interleave(64 // blocks, 1)
    off = (found.restored().double() - weight.double()).abs()
    # A scale that was rounded down does not reach as far as a block's range, at either end: the zero is rounded too.
    reach = weight.abs().double().reshape(3, blocks, -1).amax(-1).repeat_interleave(64 // blocks, 1)
    # Below float16's normal numbers a scale is coarse.
    coarse = 2.0**-25 * (1 << found.scheme.bits) if dtype == "fp16" else 0.0
    assert (off <= steps * 0.5001 + 2 * RESOLUTION[dtype] * reach + coarse).all()


@settings(deadline=None, derandomize=True)
@given(
    rows=arrays(np.float32, (2, 32), elements=st.floats(-8, 8, width=32)),
    bits=st.sampled_from([("int8", 255), ("int4", 15)]),
)
def test_a_step_is_as_short_as_its_range_allows(rows: np.ndarray, bits: tuple[str, int]) -> None:
    weight, (kind, levels) = torch.from_numpy(rows), bits
    symmetric, asymmetric = (one(weight, Scheme(kind, "fp32", 32, each)) for each in (True, False))
    tiny = torch.finfo(torch.float32).tiny
    largest = weight.abs().amax(1, keepdim=True)
    torch.testing.assert_close(symmetric.scales, (largest / (levels // 2)).clamp(min=tiny))
    reach = weight.amax(1, keepdim=True).clamp(min=0) - weight.amin(1, keepdim=True).clamp(max=0)
    torch.testing.assert_close(asymmetric.scales, (reach / levels).clamp(min=tiny))


@pytest.mark.parametrize(("dtype", "kind"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_scales_are_of_the_type_that_is_computed_in(dtype: str, kind: torch.dtype) -> None:
    weight, x = normal(8, 128), biased(64, 128)
    narrow = [Scheme("int4", dtype, 32, method=each) for each in METHODS]
    for scheme in (*narrow, *(replace(each, dtype=dtype) for each in (FP8, replace(FP8, per_tensor=True), STATIC))):
        found = one(weight, scheme, seen(x))
        assert torch.equal(found.scales, found.scales.to(kind).float()), scheme
        if found.input_scale is not None:
            assert torch.tensor(found.input_scale).to(kind).item() == found.input_scale


@pytest.mark.parametrize("kind", ["int4", "fp8"])
@pytest.mark.parametrize("size", [3e-3, 1e-4])
def test_small_rows_keep_their_levels_in_fp16(kind: str, size: float) -> None:
    """Their scales lie below fp16's normal numbers, which is no reason to round everything to a few steps."""
    weight, x, scheme = size * normal(4, 128).clamp(-3, 3) / 3, normal(64, 128), INT4 if kind == "int4" else FP8
    found = [one(weight, replace(scheme, dtype=dtype), seen(x)) for dtype in ("fp16", "fp32")]
    errors = [output_error(weight, each, x) for each in found]
    assert errors[0] < (1.1 if size > 1e-3 else 2) * errors[1]


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("scheme", DEGENERATE, ids=str)
def test_degenerate_weights_give_no_nan(dtype: str, scheme: Scheme) -> None:
    weight = normal(8, 64)
    weight[0], weight[1], weight[2], weight[3] = 0, 1.5, -1.5, 1e-30
    weight[4, 1:] = 0
    weight[5] *= 1e-42
    weight[6, :32] = 0
    x = normal(40, 64)
    x[:, 5], x[:, 6], x[:, 7] = 0, 1e-30, 1e4
    for inputs in (x, torch.zeros(3, 64), x[:1]):
        for rows in (weight, weight[:1], weight[5:6]):
            found = one(rows, replace(scheme, dtype=dtype), seen(inputs))
            assert found.scales.isfinite().all()
            assert (found.scales > 0).all()
            assert all(computed(found, case).isfinite().all() for case in (x, 1e6 * x, torch.zeros(1, 64)))
            assert rows[0].any() or not found.restored()[0].any()


@pytest.mark.parametrize(("kind", "block", "symmetric"), [("int4", 32, False), ("int8", 128, True)])
def test_gptq_is_nearer_than_the_nearest(kind: str, block: int, symmetric: bool) -> None:
    weight, x, other = normal(48, 256), correlated(512, 256), correlated(512, 256)
    scheme = Scheme(kind, "fp32", block, symmetric)
    nearest, gptq = (one(weight, replace(scheme, method=each), seen(x)) for each in ("rtn", "gptq"))
    assert output_error(weight, gptq, x) < 0.6 * output_error(weight, nearest, x)
    assert output_error(weight, gptq, other) < 0.6 * output_error(weight, nearest, other)


def plain_gptq(weight: Tensor, moment: Tensor, size: int) -> Tensor:
    """Optimal brain quantization column by column, the inverse updated each time, in float64; symmetric INT4."""
    hessian = moment.double()
    hessian = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)
    left, restored = weight.double().clone(), torch.zeros_like(weight, dtype=torch.float64)
    for k in range(weight.shape[1]):
        if k % size == 0:
            scale = left[:, k : k + size].abs().amax(1) / 7
        inverse = torch.linalg.inv(hessian[k:, k:])
        restored[:, k] = (left[:, k] / scale).round().clamp(-8, 7) * scale
        error = (left[:, k] - restored[:, k]) / inverse[0, 0]
        left[:, k:] -= error[:, None] * inverse[0]
    return restored.float()


def test_gptq_is_what_its_paper_says() -> None:
    weight, x = normal(6, 160), correlated(400, 160)  # more columns than are corrected at once
    found = one(weight, METHODS["gptq"], seen(x)).restored()
    expected = plain_gptq(weight, x.T @ x, 32)
    assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize(("method", "symmetric"), [("gptq", False), ("awq", True)])
def test_wide_weights_are_looked_at_in_spans(method: str, symmetric: bool) -> None:
    """Of so many columns that their moments are of two spans."""
    columns, scheme = SPAN + 64, replace(INT4, method=method, symmetric=symmetric)
    weight, x = normal(4, columns), correlated(300, columns)
    inputs = Inputs(x.abs().amax(0), [part.T @ part for part in torch.split(x, SPAN, 1)])
    found = one(weight, scheme, inputs)
    assert found.codes.shape == (4, columns // 32, 32)
    assert (found.zeros is None) is symmetric
    assert output_error(weight, found, x) < 1.05 * output_error(weight, one(weight, METHODS["rtn"]), x)
    if method == "gptq":  # each span by itself
        last = one(weight[:, SPAN:], scheme, Inputs(inputs.largest[SPAN:], inputs.moments[1:]))
        assert torch.equal(found.codes[:, SPAN // 32 :], last.codes)


@pytest.mark.parametrize("kind", ["normal", "correlated", "biased", "dead"])
def test_awq_is_never_worse_than_the_nearest(kind: str) -> None:
    """By the moments that it searches with, which are those of the inputs."""
    weight, x = normal(24, 128, seed=1), {"normal": normal, "correlated": correlated}.get(kind, biased)(200, 128)
    if kind == "dead":
        x[:, ::3] = 0
    inputs = seen(x)
    nearest, awq = one(weight, METHODS["rtn"]), one(weight, METHODS["awq"], inputs)
    assert awq.smooth is not None
    changes = [nearest.restored() - weight, awq.restored() / awq.smooth - weight]
    errors = [float(((each @ inputs.moments[0]) * each).sum()) for each in changes]
    assert errors[1] <= (0.7 if kind == "biased" else 1.0) * errors[0]
    assert output_error(weight, awq, x) <= 1.0001 * output_error(weight, nearest, x)


@pytest.mark.parametrize("scheme", [METHODS["awq"], STATIC, replace(FP8, per_tensor=True)], ids=["awq", "int8", "fp8"])
def test_products_of_one_input_are_divided_alike(scheme: Scheme) -> None:
    x = biased(64, 64)
    weights = {name: normal(8, 64, seed=at) * (1 + 9 * at) for at, name in enumerate("qkv")}
    found = quantize(weights, scheme, seen(x))
    assert list(found) == ["q", "k", "v"]
    for name, each in found.items():
        assert each.smooth is found["q"].smooth
        assert each.input_scale == found["q"].input_scale
        assert output_error(weights[name], each, x) < 0.2
    if scheme.per_tensor:
        assert len({float(scale) for each in found.values() for scale in each.scales.flatten()}) == 1


def test_smoothing_helps_where_an_input_is_an_outlier() -> None:
    weight, x = normal(32, 128), normal(256, 128, seed=1)
    x[:, 7] *= 100
    weight[:, 7] /= 10
    assert output_error(weight, one(weight, STATIC, seen(x)), x) < 0.02


def test_static_inputs_beyond_what_was_seen_are_the_largest() -> None:
    weight, x = torch.eye(16), normal(64, 16)
    for scheme, step in ((STATIC, 1 / 127), (FP8, 1 / 448)):
        found = one(weight, scheme, seen(x))
        assert found.input_scale is not None
        smooth = torch.ones(16) if found.smooth is None else found.smooth
        largest = found.seen(1e6 * torch.ones(1, 16))
        torch.testing.assert_close(largest[0], torch.full((16,), found.input_scale / step))
        assert found.input_scale == pytest.approx(float((x / smooth).abs().max()) * step)
        smallest = found.seen(-1e6 * torch.ones(1, 16))[0] / found.input_scale
        assert smallest.tolist() == [-128.0 if scheme.kind == "int8" else -448.0] * 16


@settings(deadline=None, derandomize=True)
@given(arrays(np.float32, (2, 64), elements=st.floats(-3, 3, width=32)))
def test_dynamic_inputs_are_within_half_a_step_of_their_block(rows: np.ndarray) -> None:
    x = torch.from_numpy(rows)
    rounded = one(normal(4, 64), replace(INT4, activations="dynamic")).seen(x)
    step = x.reshape(2, 2, 32).abs().amax(2).repeat_interleave(32, 1) / 127
    assert ((rounded - x).abs() <= 0.501 * step + 1e-37).all()
    assert len(set(rounded[0, :32].tolist())) <= 255
    unchanged = one(normal(4, 64), INT4).seen(x)
    assert torch.equal(unchanged, x)


@pytest.mark.parametrize("per_tensor", [False, True])
def test_fp8_is_the_nearest_e4m3(per_tensor: bool) -> None:
    weight = normal(8, 64) * torch.logspace(-3, 1, 8)[:, None]
    found = one(weight, replace(FP8, per_tensor=per_tensor), seen(normal(32, 64)))
    largest = weight.abs().amax(1) if not per_tensor else weight.abs().max().expand(8)
    torch.testing.assert_close(found.scales[:, 0], largest / 448)
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    nearest = (weight[..., None] / found.scales[..., None] - every).abs().nan_to_num(torch.inf).amin(-1)
    torch.testing.assert_close((found.codes[:, 0].float() - weight / found.scales).abs(), nearest)
    x = normal(4, 64, seed=2)
    assert torch.equal(found.seen(x), (x / found.input_scale).to(torch.float8_e4m3fn).float() * found.input_scale)


@pytest.mark.parametrize(
    ("block", "columns", "fitted"), [(128, 256, 128), (128, 192, 64), (128, 48, 16), (128, 40, None), (16, 24, None)]
)
def test_blocks_that_fit(block: int, columns: int, fitted: int | None) -> None:
    """On a GPU none of less than 32."""
    scheme = fit(Scheme("int4", "fp32", block), columns)
    assert scheme == (Scheme("fp32", "fp32") if fitted is None else Scheme("int4", "fp32", fitted))
    if fitted == 16:
        assert fit(Scheme("int4", "bf16", block), columns) == Scheme("bf16", "bf16")
    assert fit(STATIC, columns) == STATIC


@pytest.mark.parametrize("method", METHODS)
def test_weights_stay_as_they_were(method: str) -> None:
    weight, inputs = normal(8, 64), seen(biased(32, 64))
    before, moments = weight.clone(), inputs.moments[0].clone()
    one(weight, METHODS[method], inputs)
    assert torch.equal(weight, before)
    assert torch.equal(inputs.moments[0], moments)


@pytest.mark.parametrize("scheme", [replace(INT4, symmetric=False), FP8], ids=["int4", "fp8"])
def test_many_rows_are_rounded_as_few(scheme: Scheme) -> None:
    weight, inputs = normal(5000, 32), seen(normal(5, 32))
    whole, last = one(weight, scheme, inputs), one(weight[4990:], scheme, inputs)
    torch.testing.assert_close(whole.restored()[4990:], last.restored(), rtol=0, atol=0)
