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

from specbuild.builder.config.scheme import Scheme, parse
from specbuild.builder.quantize import numbers
from specbuild.builder.quantize.numbers import SPAN, Inputs, Quantized, fit, quantize

INT8 = Scheme("int8", "fp32", 32)
INT4 = Scheme("int4", "fp32", 32)
FP8 = Scheme("fp8", "fp32", activations="static")
STATIC = Scheme("int8", "fp32", activations="static")
METHODS = {"rtn": INT4, "gptq": replace(INT4, method="gptq"), "awq": replace(INT4, method="awq")}
RESOLUTION = {"fp32": 0.0, "fp16": 2**-11, "bf16": 2**-8}


def seen(x: Tensor) -> Inputs:
    flat = x.reshape(-1, x.shape[-1])
    return Inputs(flat.abs().amax(0), [part.T @ part for part in torch.split(flat, numbers.SPAN, 1)])


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


floats = st.floats(-1e4, 1e4, width=32)


@settings(deadline=None, derandomize=True)
@given(
    rows=arrays(np.float32, (3, 64), elements=floats),
    kind=st.sampled_from(["int8", "int4"]),
    size=st.sampled_from([16, 32, 64, 0]),
    symmetric=st.booleans(),
    dtype=st.sampled_from(["fp32", "fp16", "bf16"]),
)
def test_numbers_are_within_half_a_step(rows: np.ndarray, kind: str, size: int, symmetric: bool, dtype: str) -> None:
    weight = torch.from_numpy(rows)
    found = one(weight, Scheme(kind, dtype, size, symmetric))
    blocks = 64 // (size or 64)
    assert found.codes.shape == (3, blocks, 64 // blocks)
    assert found.codes.dtype == torch.uint8
    assert int(found.codes.max()) < 1 << found.scheme.bits
    assert found.scales.shape == (3, blocks)
    assert (found.zeros is None) is symmetric
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


def test_a_zero_is_a_zero() -> None:
    """Asymmetric numbers keep 0 exactly, however far the rest lies to one side."""
    weight = torch.cat([torch.zeros(2, 1), 3 + normal(2, 31).abs()], 1)
    for scheme in (INT8, INT4, replace(INT4, symmetric=False), replace(INT8, symmetric=False)):
        for sign in (1, -1):
            assert (one(sign * weight, scheme).restored()[:, 0] == 0).all()


@pytest.mark.parametrize(("dtype", "kind"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_scales_are_of_the_type_that_is_computed_in(dtype: str, kind: torch.dtype) -> None:
    weight, x = normal(8, 128), biased(64, 128)
    schemes = [Scheme("int8", dtype), *(Scheme("int4", dtype, 32, method=each) for each in METHODS)]
    schemes += [Scheme("fp8", dtype, activations="static"), Scheme("fp8", dtype, activations="static", per_tensor=True)]
    schemes += [Scheme("int8", dtype, activations="static")]
    for scheme in schemes:
        found = one(weight, scheme, seen(x))
        assert torch.equal(found.scales, found.scales.to(kind).float()), scheme
        if found.input_scale is not None:
            assert torch.tensor(found.input_scale).to(kind).item() == found.input_scale


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("size", [3e-3, 1e-4])
def test_small_rows_keep_their_levels_in_fp16(kind: str, size: float) -> None:
    """Their scales lie below fp16's normal numbers, which is no reason to round everything to a few steps."""
    weight, x = size * normal(4, 128).clamp(-3, 3) / 3, normal(64, 128)
    block = 32 if kind == "int4" else 0
    activations = "static" if kind == "fp8" else "weight-only"
    errors = [output_error(weight, one(weight, Scheme(kind, dtype, block, activations=activations), seen(x)), x)
              for dtype in ("fp16", "fp32")]  # fmt: skip
    assert errors[0] < (1.1 if size > 1e-3 else 2) * errors[1]


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_degenerate_weights_give_no_nan(dtype: str, method: str, symmetric: bool) -> None:
    weight = normal(9, 64)
    weight[0], weight[1], weight[2], weight[3] = 0, 1.5, -1.5, 1e-30
    weight[4] *= 1e-30
    weight[5, 1:] = 0
    weight[6] *= 1e-42
    weight[7, :32] = 0
    x = normal(40, 64)
    x[:, 5], x[:, 6], x[:, 7] = 0, 1e-30, 1e4
    for inputs in (x, torch.zeros(3, 64), x[:1]):
        for block in (16, 64):
            found = one(weight, Scheme("int4", dtype, block, symmetric, method), seen(inputs))
            assert found.scales.isfinite().all()
            assert (found.scales > 0).all()
            assert computed(found, x).isfinite().all()
            assert computed(found, torch.zeros(1, 64)).isfinite().all()
            assert not found.restored()[0].any()
            if method == "rtn":
                levels = 7 if symmetric else 15
                torch.testing.assert_close(found.restored()[1:3], weight[1:3], rtol=0, atol=1.5 * 2**-8)
                assert (found.restored()[5, 0] - weight[5, 0]).abs() <= 2**-8 * weight[5, 0].abs() * levels


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_degenerate_static_weights_give_no_nan(dtype: str, kind: str) -> None:
    weight = normal(5, 64)
    weight[0], weight[1], weight[2] = 0, 1e-30, 1e-42
    weight[3] *= 2e-7
    x = normal(40, 64)
    x[:, 5], x[:, 6], x[:, 7] = 0, 1e-30, 1e4
    for rows in (weight, weight[:3], weight[:1], weight[3:4]):
        for inputs in (x, torch.zeros(3, 64)):
            for per_tensor in (False, True) if kind == "fp8" else (False,):
                found = one(rows, Scheme(kind, dtype, activations="static", per_tensor=per_tensor), seen(inputs))
                for case in (x, 1e6 * x, torch.zeros(1, 64)):
                    assert computed(found, case).isfinite().all()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("block", [32, 128])
def test_gptq_is_nearer_than_the_nearest(kind: str, symmetric: bool, block: int) -> None:
    weight, x, other = normal(48, 256), correlated(512, 256), correlated(512, 256)
    scheme = Scheme(kind, "fp32", block, symmetric)
    nearest, gptq = (one(weight, replace(scheme, method=each), seen(x)) for each in ("rtn", "gptq"))
    assert output_error(weight, gptq, x) < 0.6 * output_error(weight, nearest, x)
    assert output_error(weight, gptq, other) < 0.6 * output_error(weight, nearest, other)
    assert (gptq.restored() - weight).norm() > (nearest.restored() - weight).norm()


def test_gptq_of_white_inputs_is_the_nearest() -> None:
    weight = normal(16, 128)
    white = Inputs(torch.ones(128), [torch.eye(128)])
    nearest, gptq = (one(weight, METHODS[each], white) for each in ("rtn", "gptq"))
    assert torch.equal(nearest.codes, gptq.codes)
    torch.testing.assert_close(nearest.scales, gptq.scales)
    x = normal(4096, 128, seed=5)
    few = one(weight, METHODS["gptq"], seen(x))
    assert output_error(weight, few, x) == pytest.approx(output_error(weight, nearest, x), rel=0.03)


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


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_wide_weights_are_looked_at_in_spans(monkeypatch: pytest.MonkeyPatch, method: str, symmetric: bool) -> None:
    weight, x = normal(8, 160), correlated(300, 160)
    scheme = replace(INT4, method=method, symmetric=symmetric)
    whole = one(weight, scheme, seen(x))
    monkeypatch.setattr(numbers, "SPAN", 64)
    inputs = seen(x)
    assert [len(each) for each in inputs.moments] == [64, 64, 32]
    found = one(weight, scheme, inputs)
    assert found.codes.shape == whole.codes.shape == (8, 5, 32)
    assert found.scales.shape == (8, 5)
    assert (found.zeros is None) is symmetric
    assert output_error(weight, found, x) < 1.05 * output_error(weight, one(weight, METHODS["rtn"]), x)
    if method == "gptq":  # each span by itself
        last = one(weight[:, 128:], scheme, Inputs(inputs.largest[128:], inputs.moments[2:]))
        assert torch.equal(found.codes[:, 4:], last.codes)
        assert not torch.equal(found.codes, whole.codes)


def test_spans_are_whole_blocks_and_steps() -> None:
    assert SPAN % 128 == 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["normal", "correlated", "biased", "dead"])
def test_awq_is_never_worse_than_the_nearest(kind: str, seed: int) -> None:
    """By the moments that it searches with, which are those of the inputs."""
    weight = normal(24, 128, seed=seed)
    x = {"normal": normal(200, 128), "correlated": correlated(200, 128), "biased": biased(200, 128)}.get(kind)
    if x is None:
        x = biased(200, 128)
        x[:, ::3] = 0
    inputs = seen(x)
    nearest, awq = one(weight, METHODS["rtn"]), one(weight, METHODS["awq"], inputs)
    assert awq.smooth is not None
    changes = [nearest.restored() - weight, awq.restored() / awq.smooth - weight]
    errors = [float(((each @ inputs.moments[0]) * each).sum()) for each in changes]
    assert errors[1] <= errors[0]
    if kind == "biased":
        assert errors[1] < 0.7 * errors[0]
    assert output_error(weight, awq, x) <= 1.0001 * output_error(weight, nearest, x)


@pytest.mark.parametrize("method", ["awq", "static"])
def test_products_of_one_input_are_divided_alike(method: str) -> None:
    x = biased(64, 64)
    scheme = METHODS["awq"] if method == "awq" else STATIC
    weights = {name: normal(8, 64, seed=at) * (1 + 9 * at) for at, name in enumerate("qkv")}
    found = quantize(weights, scheme, seen(x))
    assert list(found) == ["q", "k", "v"]
    for name, each in found.items():
        assert each.smooth is found["q"].smooth
        assert each.input_scale == found["q"].input_scale
        assert output_error(weights[name], each, x) < 0.2


@pytest.mark.parametrize("scheme", [Scheme("int8", "fp32", activations="static")])
def test_smoothing_helps_where_an_input_is_an_outlier(monkeypatch: pytest.MonkeyPatch, scheme: Scheme) -> None:
    weight, x = normal(32, 128), normal(256, 128, seed=1)
    x[:, 7] *= 100
    weight[:, 7] /= 10
    smoothed = output_error(weight, one(weight, scheme, seen(x)), x)
    monkeypatch.setattr(numbers, "_smoothing", lambda weight, largest: torch.ones_like(largest))
    plain = output_error(weight, one(weight, scheme, seen(x)), x)
    assert smoothed < 0.3 * plain
    assert smoothed < 0.02


def test_smoothing_evens_out_inputs_and_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers, "ALPHA", 0.5)
    weight, x = normal(32, 128), biased(256, 128)
    found = one(weight, STATIC, seen(x))
    assert found.smooth is not None
    torch.testing.assert_close(x.abs().amax(0) / found.smooth, (weight * found.smooth).abs().amax(0))
    assert found.input_scale == pytest.approx(float((x / found.smooth).abs().max()) / 127)


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


def e4m3() -> Tensor:
    """All its finite numbers, written out."""
    found = []
    for byte in range(256):
        sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
        if (exponent, mantissa) != (15, 7):
            size = mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
            found.append(-size if sign else size)
    return torch.tensor(found).unique()


@pytest.mark.parametrize("per_tensor", [False, True])
def test_fp8_is_the_nearest_e4m3(per_tensor: bool) -> None:
    weight = normal(8, 64) * torch.logspace(-3, 1, 8)[:, None]
    found = one(weight, replace(FP8, per_tensor=per_tensor), seen(normal(32, 64)))
    assert found.codes.dtype == torch.float8_e4m3fn
    largest = weight.abs().amax(1) if not per_tensor else weight.abs().max().expand(8)
    torch.testing.assert_close(found.scales[:, 0], largest / 448)
    expected = (weight / found.scales).to(torch.float8_e4m3fn)
    assert torch.equal(found.codes[:, 0].view(torch.uint8), expected.view(torch.uint8))
    scaled, all_of = weight / found.scales, e4m3()
    assert len(all_of) == 253
    nearest = (scaled[..., None] - all_of).abs().amin(-1)
    torch.testing.assert_close((found.codes[:, 0].float() - scaled).abs(), nearest)
    x = normal(4, 64, seed=2)
    assert torch.equal(found.seen(x), (x / found.input_scale).to(torch.float8_e4m3fn).float() * found.input_scale)


def test_one_scale_for_all_products_of_one_input() -> None:
    weights = {"q": normal(8, 32), "k": 100 * normal(8, 32, seed=1)}
    found = quantize(weights, replace(FP8, per_tensor=True), seen(normal(8, 32)))
    assert len({float(scale) for each in found.values() for scale in each.scales.flatten()}) == 1


@pytest.mark.parametrize(
    ("block", "columns", "fitted"),
    [(128, 256, 128), (128, 192, 64), (128, 96, 32), (128, 48, 16), (32, 48, 16), (128, 40, None), (16, 24, None)],
)
def test_blocks_that_fit(block: int, columns: int, fitted: int | None) -> None:
    """On a GPU none of less than 32."""
    scheme = fit(Scheme("int4", "fp32", block), columns)
    assert scheme == (Scheme("fp32", "fp32") if fitted is None else Scheme("int4", "fp32", fitted))
    if fitted == 16:
        assert fit(Scheme("int4", "bf16", block), columns) == Scheme("bf16", "bf16")


def test_rows_always_fit() -> None:
    assert fit(STATIC, 37) == STATIC
    assert one(normal(3, 37), STATIC, seen(normal(5, 37))).restored().shape == (3, 37)


@pytest.mark.parametrize("method", METHODS)
def test_weights_stay_as_they_were(method: str) -> None:
    weight, inputs = normal(8, 64), seen(biased(32, 64))
    before, moments = weight.clone(), inputs.moments[0].clone()
    one(weight, METHODS[method], inputs)
    assert torch.equal(weight, before)
    assert torch.equal(inputs.moments[0], moments)


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_rows_are_rounded_in_parts(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    weights = {"w": torch.randn(9, 64, generator=torch.Generator().manual_seed(3))}
    backend = "tensorrt" if kind == "fp8" else "onnxruntime"
    asked = replace(parse(kind, backend), method="rtn", activations="weight-only")
    whole = quantize(weights, asked)["w"]
    monkeypatch.setattr(numbers, "_ROWS", 4)
    parts, before = quantize(weights, asked)["w"], whole.codes.clone()
    torch.testing.assert_close(parts.restored(), whole.restored(), rtol=0, atol=0)
    assert torch.equal(whole.codes.view(torch.uint8), before.view(torch.uint8))  # what was restored is as it was
