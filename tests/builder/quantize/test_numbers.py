"""The numbers of a weight: within half a step, GPTQ, AWQ and SmoothQuant for the better, and never NaN."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from specbuild.builder.config.scheme import Scheme
from specbuild.builder.quantize.numbers import Inputs, fit, quantize

INT4 = Scheme("int4", "fp32", 32)
FP8 = Scheme("fp8", "fp32", activations="static")
STATIC = Scheme("int8", "fp32", activations="static")
GPTQ, AWQ = (replace(INT4, method=each) for each in ("gptq", "awq"))
SCHEMES = [INT4, GPTQ, AWQ, replace(GPTQ, symmetric=False), replace(AWQ, block=64)]
SCHEMES += [STATIC, FP8, replace(FP8, per_tensor=True)]
RESOLUTION = {"fp32": 0.0, "fp16": 2**-11, "bf16": 2**-8}


def seen(x):
    flat = x.reshape(-1, x.shape[-1])
    return Inputs(flat.abs().amax(0), [flat.T @ flat])


def one(weight, scheme, inputs=None):
    return quantize({"w": weight}, scheme, inputs)["w"]


def computed(found, x):
    return found.seen(x) @ found.restored().T


def output_error(weight, found, x):
    exact = x @ weight.T
    return float((computed(found, x) - exact).norm() / exact.norm())


def correlated(rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, columns // 8, generator=generator)
    mixed = hidden @ torch.randn(columns // 8, columns, generator=generator)
    return mixed + 0.1 * torch.randn(rows, columns, generator=generator)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def biased(rows, columns):
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
def test_numbers_are_within_half_a_step(rows, kind, size, symmetric, dtype):
    """Of a step no longer than its block needs; and a zero is a zero."""
    rows[:, 0] = 0
    weight = torch.from_numpy(rows)
    found = one(weight, Scheme(kind, dtype, size, symmetric))
    assert (found.zeros is None) is symmetric
    assert not found.restored()[:, 0].any()
    blocks = weight.double().reshape(3, 64 // (size or 64), -1)
    off = (found.restored().double() - weight.double()).abs().reshape(blocks.shape).amax(-1)
    # A scale that was rounded down does not reach as far as a block's range, at either end: the zero is rounded too.
    largest, levels = blocks.abs().amax(-1), (1 << found.scheme.bits) - 1
    # Below float16's normal numbers a scale is coarse.
    coarse = 2.0**-25 * (levels + 1) if dtype == "fp16" else 0.0
    assert (off <= found.scales * 0.5001 + 2 * RESOLUTION[dtype] * largest + coarse).all()
    reach = largest / (levels // 2) if symmetric else (blocks.amax(-1).clamp(0) + (-blocks).amax(-1).clamp(0)) / levels
    assert (found.scales <= reach * (1.00001 + RESOLUTION[dtype]) + 2.0**-24).all()


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_scales_are_of_the_type_that_is_computed_in(dtype):
    weight, x, kind = normal(8, 128), biased(64, 128), {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    for scheme in SCHEMES:
        found = one(weight, replace(scheme, dtype=dtype), seen(x))
        scales = torch.cat([found.scales.flatten(), torch.tensor([found.input_scale or 0.0])])
        assert torch.equal(scales, scales.to(kind).float()), scheme


@pytest.mark.parametrize("scheme", [INT4, FP8], ids=["int4", "fp8"])
def test_small_rows_keep_their_levels_in_fp16(scheme):
    """Their scales lie below fp16's normal numbers, which is no reason to round everything to a few steps."""
    for size, worse in ((3e-3, 1.1), (1e-4, 2)):
        weight, x = size * normal(4, 128).clamp(-3, 3) / 3, normal(64, 128)
        narrow, exact = (one(weight, replace(scheme, dtype=dtype), seen(x)) for dtype in ("fp16", "fp32"))
        assert output_error(weight, narrow, x) < worse * output_error(weight, exact, x)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_degenerate_weights_give_no_nan(dtype, scheme):
    weight = normal(8, 64)
    weight[0], weight[1], weight[2], weight[3] = 0, 1.5, -1.5, 1e-30
    weight[4, 1:] = 0
    weight[5] *= 1e-42
    x = normal(40, 64)
    x[:, 5], x[:, 6], x[:, 7] = 0, 1e-30, 1e4
    for inputs in (x, torch.zeros(3, 64), x[:1]):
        for rows in (weight, weight[:1], weight[5:6]):
            found = one(rows, replace(scheme, dtype=dtype), seen(inputs))
            assert (found.scales > 0).all()
            assert all(computed(found, case).isfinite().all() for case in (x, 1e6 * x, torch.zeros(1, 64)))
            assert rows[0].any() or not found.restored()[0].any()


def plain_gptq(weight, moment, size):
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


def test_gptq_is_what_its_paper_says():
    weight, x = normal(6, 160), correlated(400, 160)  # more columns than are corrected at once
    found = one(weight, GPTQ, seen(x)).restored()
    expected = plain_gptq(weight, x.T @ x, 32)
    assert (found - expected).abs().max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_wide_weights_are_looked_at_in_spans(method):
    """Of so many columns that their moments are of two spans."""
    span, scheme = 256, replace(INT4, method=method, symmetric=method == "awq")
    weight, x = normal(4, span + 64), correlated(300, span + 64)
    inputs = Inputs(x.abs().amax(0), [part.T @ part for part in torch.split(x, span, 1)])
    found = one(weight, scheme, inputs)
    assert output_error(weight, found, x) < 1.05 * output_error(weight, one(weight, INT4), x)
    if method == "gptq":  # each span by itself
        last = one(weight[:, span:], scheme, Inputs(inputs.largest[span:], inputs.moments[1:]))
        assert torch.equal(found.codes[:, span // 32 :], last.codes)


@pytest.mark.parametrize("kind", ["correlated", "biased", "dead"])
def test_awq_is_never_worse_than_the_nearest(kind):
    """By the moments that it searches with, which are those of the inputs."""
    weight, x = normal(24, 128, seed=1), (correlated if kind == "correlated" else biased)(200, 128)
    if kind == "dead":
        x[:, ::3] = 0
    nearest, awq = one(weight, INT4), one(weight, AWQ, seen(x))
    assert output_error(weight, awq, x) <= (0.9 if kind == "biased" else 1.0001) * output_error(weight, nearest, x)


@pytest.mark.parametrize("scheme", [AWQ, STATIC, replace(FP8, per_tensor=True)], ids=["awq", "int8", "fp8"])
def test_products_of_one_input_are_divided_alike(scheme):
    x = biased(64, 64)
    weights = {name: normal(8, 64, seed=at) * (1 + 9 * at) for at, name in enumerate("qkv")}
    found = quantize(weights, scheme, seen(x))
    for name, each in found.items():
        assert each.smooth is found["q"].smooth
        assert each.input_scale == found["q"].input_scale
        assert output_error(weights[name], each, x) < 0.2
        assert not scheme.per_tensor or (each.scales == found["q"].scales[0, 0]).all()


def test_smoothing_helps_where_an_input_is_an_outlier():
    weight, x = normal(32, 128), normal(256, 128, seed=1)
    x[:, 7] *= 100
    weight[:, 7] /= 10
    assert output_error(weight, one(weight, STATIC, seen(x)), x) < 0.02


def test_static_inputs_beyond_what_was_seen_are_the_largest():
    x = normal(64, 16)
    for scheme, lowest, levels in ((STATIC, -128, 127), (FP8, -448, 448)):
        found = one(torch.eye(16), scheme, seen(x))
        largest = (x if found.smooth is None else x / found.smooth).abs().max()
        assert found.input_scale == pytest.approx(float(largest) / levels)
        far = found.seen(torch.tensor([[-1e6], [1e6]]).expand(2, 16)) / found.input_scale
        torch.testing.assert_close(far, torch.tensor([[lowest], [levels]]).expand(2, 16).float())


@settings(deadline=None, derandomize=True)
@given(arrays(np.float32, (2, 64), elements=st.floats(-3, 3, width=32)))
def test_dynamic_inputs_are_within_half_a_step_of_their_block(rows):
    x, scheme = torch.from_numpy(rows), replace(INT4, activations="dynamic")
    found = one(normal(4, 64), scheme)
    rounded = found.seen(x)
    step = x.reshape(2, 2, 32).abs().amax(2).repeat_interleave(32, 1) / 127
    assert ((rounded - x).abs() <= 0.501 * step + 1e-37).all()
    assert len(rounded[0].unique()) <= 255 * 2
    assert torch.equal(replace(found, scheme=INT4).seen(x), x)


@pytest.mark.parametrize("per_tensor", [False, True])
def test_fp8_is_the_nearest_e4m3(per_tensor):
    weight, x = normal(8, 64) * torch.logspace(-3, 1, 8)[:, None], normal(4, 64, seed=2)
    found = one(weight, replace(FP8, per_tensor=per_tensor), seen(normal(32, 64)))
    largest = weight.abs().max().expand(8) if per_tensor else weight.abs().amax(1)
    torch.testing.assert_close(found.scales[:, 0], largest / 448)
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(torch.inf)
    nearest = (weight[..., None] / found.scales[..., None] - every).abs().amin(-1)
    torch.testing.assert_close((found.codes[:, 0].float() - weight / found.scales).abs(), nearest)
    assert torch.equal(found.seen(x), (x / found.input_scale).to(torch.float8_e4m3fn).float() * found.input_scale)


@pytest.mark.parametrize(
    ("block", "columns", "fitted"), [(128, 256, 128), (128, 192, 64), (128, 48, 16), (128, 40, None), (16, 24, None)]
)
def test_blocks_that_fit(block, columns, fitted):
    """On a GPU none of less than 32."""
    scheme = fit(Scheme("int4", "fp32", block), columns)
    assert scheme == (Scheme("fp32", "fp32") if fitted is None else Scheme("int4", "fp32", fitted))
    if fitted == 16:
        assert fit(Scheme("int4", "bf16", block), columns) == Scheme("bf16", "bf16")
    assert fit(STATIC, columns) == STATIC


@pytest.mark.parametrize("scheme", [GPTQ, AWQ], ids=["gptq", "awq"])
def test_weights_stay_as_they_were(scheme):
    weight, inputs = normal(8, 64), seen(biased(32, 64))
    before, moments = weight.clone(), inputs.moments[0].clone()
    one(weight, scheme, inputs)
    assert torch.equal(weight, before)
    assert torch.equal(inputs.moments[0], moments)


@pytest.mark.parametrize("scheme", [replace(INT4, symmetric=False), FP8], ids=["int4", "fp8"])
def test_many_rows_are_rounded_as_few(scheme):
    weight, inputs = normal(5000, 32), seen(normal(5, 32))
    whole, last = one(weight, scheme, inputs), one(weight[4990:], scheme, inputs)
    torch.testing.assert_close(whole.restored()[4990:], last.restored(), rtol=0, atol=0)
