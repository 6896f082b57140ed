"""Quantizes weights: rounded to nearest, or such that a layer's output changes least (GPTQ, AWQ, SmoothQuant).

A weight is `[N, K]`, with a row for each output. GPTQ is Frantar et al., arXiv 2210.17323; AWQ is Lin et al., arXiv
2306.00978, whose scales are searched with the inputs' second moments; SmoothQuant is Xiao et al., arXiv 2211.10438.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specbuild.builder.config.scheme import BLOCKS, LEAST_GPU_BLOCK, Scheme
from specbuild.builder.frontend.lazy_weights import ALL, Rows, Weight, check_finite

E4M3_LARGEST = 448.0
DAMPING = 0.01  # fraction of the mean of a Hessian's diagonal
ALPHA = 0.7  # SmoothQuant's migration strength; more would overfit the calibration texts
_MAX_SMOOTH = 2.0**14  # bounds factors from above, its inverse from below: even a column without inputs fits fp16
_STEP = 128  # columns that GPTQ corrects at once
_CACHED = 1024  # rows of which that many columns stay in a processor's cache
_ROWS = 4096  # rows that are rounded at a time
PARTS = "codes", "scales", "zeros", "offsets", "scale_steps", "offset_steps"
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class Inputs:
    """Statistics of the inputs `[…, K]` that some linear layers share.

    Attributes:
        largest: float32 `[K]`, each column's largest magnitude.
        moments: `Σ xᵀx`, float32 `[span, span]` for each span of columns; [] if no method needs them.
    """

    largest: Tensor
    moments: list[Tensor]


class Numbers(ABC):
    """A quantized weight, whose numbers are made or read when they are needed.

    Attributes:
        scheme: How it is stored and computed with.
        smooth: float32 `[K]`, by which inputs are divided; None for 1.
        input_scale: The scale of static activations.
        shape: How many rows there are, how many blocks a row has, and how many columns a block.
        parts: The names of `Quantized`'s fields that have numbers.
    """

    scheme: Scheme
    smooth: Tensor | None = None
    input_scale: float | None = None
    shape: tuple[int, int, int]
    parts: tuple[str, ...]

    @abstractmethod
    def whole(self, rows: Rows = ALL) -> Quantized:
        """Return the weight, or some of its rows, with its numbers."""

    def seen(self, x: Tensor) -> Tensor:
        """Divide inputs `[…, K]` by `smooth` and round them as the scheme says; return them in their own type."""
        dtype, x = x.dtype, x.float()
        x = x if self.smooth is None else x / self.smooth
        if self.scheme.activations in ("dynamic", "wide"):
            x = _rounded_inputs(x, self.shape[2], 16 if self.scheme.activations == "wide" else 8)
        elif self.input_scale is not None:
            scaled = x / self.input_scale
            if self.scheme.kind == "fp8":
                scaled = scaled.to(torch.float8_e4m3fn).float()  # the cast saturates
            else:
                scaled = scaled.round().clamp(-128, 127)
            x = scaled * self.input_scale
        return x.to(dtype)


@dataclass(frozen=True, eq=False)
class Quantized(Numbers):
    """A quantized weight `[N, K]` in memory, in blocks: `w · smooth ≈ scales · (codes − zeros) + offsets`.

    Attributes, beside those of Numbers:
        codes: uint8 or E4M3 `[N, blocks, size]`.
        scales: float32 `[N, blocks]`, or int8 if they have steps.
        zeros: uint8 `[N, blocks]`; None if all are the middle code, and for E4M3.
        offsets: As scales, only with zero points; None for 0.
        scale_steps, offset_steps: float32 `[N, K / 256]`, by which scales and offsets are multiplied; None for 1.
    """

    scheme: Scheme
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    smooth: Tensor | None = None
    input_scale: float | None = None
    offsets: Tensor | None = None
    scale_steps: Tensor | None = None
    offset_steps: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:  # type: ignore[override]
        """See Numbers."""
        rows, blocks, size = self.codes.shape
        return rows, blocks, size

    @property
    def parts(self) -> tuple[str, ...]:  # type: ignore[override]
        """See Numbers."""
        return tuple(name for name in PARTS if getattr(self, name) is not None)

    def whole(self, rows: Rows = ALL) -> Quantized:
        """See Numbers."""
        if isinstance(rows, slice) and rows == ALL:
            return self
        return replace(self, **{name: getattr(self, name)[rows] for name in self.parts})

    def restored(self) -> Tensor:
        """Return the dequantized weight, smoothed as inputs expect it: float32 `[N, K]`."""
        blocks = self.codes.to(torch.float32, copy=True)  # the rest is in place, as embeddings are large
        if self.scheme.kind != "fp8":
            blocks -= 1 << self.scheme.bits - 1 if self.zeros is None else self.zeros[..., None].float()
        blocks *= _floats(self.scales, self.scale_steps)[..., None]
        if self.offsets is not None:
            blocks += _floats(self.offsets, self.offset_steps)[..., None]
        return blocks.flatten(1)


def _floats(factors: Tensor, steps: Tensor | None) -> Tensor:
    """Return scales or offsets `[N, blocks]` in float32."""
    return factors if steps is None else factors * steps.repeat_interleave(factors.shape[1] // steps.shape[1], 1)


@dataclass(frozen=True, eq=False)
class RoundedWeight(Numbers):
    """A weight that is rounded to nearest when it is written, some rows at a time."""

    name: str
    weight: Weight
    scheme: Scheme

    @property
    def shape(self) -> tuple[int, int, int]:  # type: ignore[override]
        """See Numbers."""
        rows, columns = self.weight.shape
        size = self.scheme.block or columns
        return rows, columns // size, size

    @property
    def parts(self) -> tuple[str, ...]:  # type: ignore[override]
        """See Numbers."""
        return ("codes", "scales") if self.scheme.symmetric else ("codes", "scales", "zeros")

    def whole(self, rows: Rows = ALL) -> Quantized:
        """See Numbers."""
        if not isinstance(rows, slice) or rows != ALL:
            return self._part(rows)
        return joined([self._part(slice(at, at + _ROWS)) for at in range(0, self.shape[0], _ROWS)])

    def _part(self, rows: Rows) -> Quantized:
        weight = self.weight.read(rows)
        check_finite(self.name, weight)
        return _rounded(weight, self.scheme)


def joined(parts: Sequence[Quantized], axis: int = 0) -> Quantized:
    """Return parts of a weight, rows or (`axis` 1) blocks of columns, as one; all have numbers of the same names."""
    whole: dict[str, Any] = {n: torch.cat([getattr(part, n) for part in parts], axis) for n in parts[0].parts}
    return replace(parts[0], **whole)


def _rounded_inputs(x: Tensor, size: int, bits: int) -> Tensor:
    """Round inputs `[…, K]` to so many bits, with a scale of its own for each `size` columns."""
    blocks = x.reshape(*x.shape[:-1], -1, size)
    scales = blocks.abs().amax(-1, keepdim=True).clamp(min=_TINY) / ((1 << bits - 1) - 1)
    return ((blocks / scales).round() * scales).flatten(-2)


def fit(scheme: Scheme, columns: int) -> Scheme:
    """Return the scheme for a weight of `columns` columns: with a smaller block if needed, or not quantized."""
    if not scheme.block or columns % scheme.block == 0:
        return scheme
    low = 0 if scheme.dtype == "fp32" else LEAST_GPU_BLOCK
    size = next((size for size in BLOCKS if low <= size < scheme.block and columns % size == 0), 0)
    return replace(scheme, block=size) if size else Scheme(scheme.dtype, scheme.dtype)


def quantize(weights: dict[str, Tensor], scheme: Scheme, inputs: Inputs | None = None) -> dict[str, Quantized]:
    """Quantize weights `[N, K]` of linear layers that share an input, and so its `smooth` and `input_scale`.

    Args:
        weights: The weights, by name.
        scheme: The scheme of all of them.
        inputs: The input's statistics; needed if the scheme is calibrated.
    """
    if not scheme.calibrated:
        return {name: _rounded(weight, scheme) for name, weight in weights.items()}
    assert inputs is not None
    if scheme.method == "gptq":
        factors = [_inverse_factor(moment) for moment in inputs.moments]
        return {name: _gptq(weight, scheme, factors) for name, weight in weights.items()}
    together = torch.cat(list(weights.values()))
    smooth, input_scale = None, None
    if scheme.method == "awq":
        smooth = _awq(together, scheme, inputs.moments)
    elif scheme.activations == "static" and scheme.kind == "int8":
        smooth = _smoothing(together, inputs.largest)
    if smooth is not None:
        smooth = 1 / _in_dtype(1 / smooth.clamp(1 / _MAX_SMOOTH, _MAX_SMOOTH), scheme)  # as its inverse is stored
    if scheme.activations == "static":
        largest = inputs.largest if smooth is None else inputs.largest / smooth
        levels = E4M3_LARGEST if scheme.kind == "fp8" else 127
        input_scale = _in_dtype(largest.max().clamp(min=1e-8) / levels, scheme).item()
    scale = _in_dtype(together.abs().max().clamp(min=_TINY) / E4M3_LARGEST, scheme) if scheme.per_tensor else None
    smoothed = weights if smooth is None else {name: weight * smooth for name, weight in weights.items()}
    rounded = {name: _rounded(weight, scheme, scale) for name, weight in smoothed.items()}
    return {name: replace(each, smooth=smooth, input_scale=input_scale) for name, each in rounded.items()}


def _in_dtype(scales: Tensor, scheme: Scheme) -> Tensor:
    """Round scales as they are stored, to the type that the model computes in, and never to 0."""
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[scheme.dtype]
    low = 2.0**-24 if dtype == torch.float16 else torch.finfo(dtype).tiny  # scales of INT8 are subnormal in fp16
    return scales.to(dtype).clamp(min=low).float()


def _of_blocks(scales: Tensor, scheme: Scheme) -> Tensor:
    """Round blocks' scales as they are stored, never to 0 and to nothing infinite."""
    if scheme.scale_bits == 32:
        return _in_dtype(scales, scheme)
    return _in_dtype(scales.clamp(max=torch.finfo(torch.float16).max), replace(scheme, dtype="fp16"))


def _grid(blocks: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor | None]:
    """Return scales and zero points `[…]` of blocks `[…, size]`; zero points are None for the middle code."""
    levels = (1 << scheme.bits) - 1
    if scheme.symmetric:
        return _of_blocks(blocks.abs().amax(-1) / (levels // 2), scheme), None
    low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
    scales = _of_blocks((high - low) / levels, scheme)
    return scales, (-low / scales).round().clamp(0, levels)


def _codes(blocks: Tensor, scheme: Scheme, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Return the codes nearest to blocks `[…, size]` on the grid that `_grid` returned."""
    middle = float(1 << scheme.bits - 1) if zeros is None else zeros[..., None]
    return ((blocks / scales[..., None]).round() + middle).clamp(0, (1 << scheme.bits) - 1)


def _rounded(weight: Tensor, scheme: Scheme, scale: Tensor | None = None) -> Quantized:
    """Round a weight to nearest, some rows at a time. `scale` is one for all rows of E4M3; None for one per row."""
    return joined([_rounded_rows(part, scheme, scale) for part in torch.split(weight, _ROWS)])


def _rounded_rows(weight: Tensor, scheme: Scheme, scale: Tensor | None) -> Quantized:
    blocks = weight.reshape(len(weight), -1, scheme.block or weight.shape[1])
    if scheme.kind == "fp8":
        scales = _in_dtype(blocks.abs().amax(-1) / E4M3_LARGEST, scheme) if scale is None else scale
        scales = scales.expand(blocks.shape[:2]).contiguous()
        return Quantized(scheme, (blocks / scales[..., None]).to(torch.float8_e4m3fn), scales)
    scales, zeros = _grid(blocks, scheme)
    codes = _codes(blocks, scheme, scales, zeros)
    return Quantized(scheme, codes.byte(), scales, None if zeros is None else zeros.byte())


def _gptq(weight: Tensor, scheme: Scheme, factors: Sequence[Tensor]) -> Quantized:
    """Round column by column, correcting the columns that are not rounded yet for each error (GPTQ's algorithm 1).

    The steps are so small that a second thread would mostly wait, and for seconds where another program computes.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return joined([_gptq_rows(rows, scheme, factors) for rows in torch.split(weight, _CACHED)])
    finally:
        torch.set_num_threads(threads)


def _gptq_rows(weight: Tensor, scheme: Scheme, factors: Sequence[Tensor]) -> Quantized:
    size, parts = scheme.block, list[Quantized]()
    for columns, factor in zip(torch.split(weight, [len(each) for each in factors], 1), factors, strict=True):
        left, codes = columns.clone(), torch.empty(columns.shape, dtype=torch.uint8)
        scales, zeros = [], []
        for start in range(0, left.shape[1], _STEP):
            stop = min(start + _STEP, left.shape[1])
            some = left[:, start:stop].T.contiguous()  # a column's numbers side by side
            errors, rounded = torch.empty_like(some), torch.empty_like(some)
            for at, k in enumerate(range(start, stop)):
                if k % size == 0:
                    scale, zero = _grid(some[at : at + size].T, scheme)
                    scales.append(scale)
                    zeros.append(zero)
                    middle = float(1 << scheme.bits - 1) if zero is None else zero
                code = _codes(some[at, :, None], scheme, scale, zero)[:, 0]
                rounded[at] = code
                errors[at] = (some[at] - (code - middle) * scale) / factor[k, k]
                some[at:] -= factor[k, k:stop, None] * errors[at]
            codes[:, start:stop] = rounded.T
            left[:, stop:] -= errors.T.contiguous() @ factor[start:stop, stop:]
        zero_points = None if scheme.symmetric else torch.stack(zeros, 1).byte()  # type: ignore[arg-type]
        blocks = codes.reshape(len(codes), -1, size)
        parts.append(Quantized(scheme, blocks, torch.stack(scales, 1), zero_points))
    return joined(parts, 1)


def _inverse_factor(moment: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the damped Hessian's inverse, float32; damping allows columns of zeros."""
    hessian = moment.double()
    mean = hessian.diagonal().mean().clamp(min=1e-8)
    hessian = hessian + torch.eye(len(hessian), dtype=torch.float64) * (DAMPING * mean)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.float()


def _awq(weight: Tensor, scheme: Scheme, moments: list[Tensor]) -> Tensor:
    """Return column scales `[K]`: the power of the input columns' norms with which the outputs change least."""
    sizes = torch.cat([moment.diagonal() for moment in moments]).sqrt().clamp(min=1e-8)
    best, low = torch.ones_like(sizes), float("inf")
    for step in range(20):
        smooth = sizes ** (step / 20)
        smooth = smooth / (smooth.max() * smooth.min()).sqrt()
        change = _rounded(weight * smooth, scheme).restored() / smooth - weight
        spans = zip(torch.split(change, [len(each) for each in moments], 1), moments, strict=True)
        error = sum(float(((part @ moment) * part).sum()) for part, moment in spans)
        if error < low:
            best, low = smooth, error
    return best


def _smoothing(weight: Tensor, largest: Tensor) -> Tensor:
    """Return SmoothQuant's factors `[K]`: dividing inputs and multiplying weights by them balances their ranges."""
    return (largest.clamp(min=1e-5) ** ALPHA / weight.abs().amax(0).clamp(min=1e-5) ** (1 - ALPHA)).clamp(min=1e-5)
