"""Grids: whether weights lie on a grid in blocks already, as those of a GGUF, GPTQ or AWQ checkpoint do.

On such a grid a block's numbers are `low + step · code`. GGUF's Q4_0 and Q8_0 keep a step for each block, Q4_1 a lowest
number too (ggml's `quants.c`); GPTQ and AWQ a step and a whole number that stands for 0. Dequantized, a checkpoint says
nothing of it any more, but its numbers do: they are found here, and kept instead of being rounded once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specbuild.builder.config.scheme import BLOCKS, Scheme

from .linears import groups, rows
from .numbers import Quantized, fit

METHOD = "grid"
_APART = 1e-3  # of a block's range; numbers that are closer are one number
_OFF = 0.02  # of a step, by which rounding may move a number
_WHOLE = 1e-4  # of a step, by which 0 may lie off a grid that has it
_NEAR = 0.04, 0.01  # of a step, by which 0 may lie off a finer grid: at most, and in the mean square
_MULTIPLES = 6  # of a step, that the least difference of a block's numbers may be
_SAMPLE = 64  # rows that are looked at before all are
_ROWS = 4096  # at a time


@dataclass(frozen=True, slots=True)
class _Grid:
    """Codes from 0 on, uint8 `[N, blocks, size]`; steps and lowest numbers, float64 `[N, blocks]`."""

    codes: Tensor
    steps: Tensor
    low: Tensor


def own_grids(model: PreTrainedModel, schemes: Mapping[str, Scheme]) -> dict[str, Quantized]:
    """The numbers of those weights, by name, that lie on a grid that their scheme can hold.

    Schemes in blocks that compute in float32 can. Products of one input have one kind of grid, or none.
    """
    columns = {name: rows(model.get_submodule(name)).shape[1] for name in schemes}
    fitting = {name: fit(scheme, columns[name]) for name, scheme in schemes.items()}
    wanted = [name for name, scheme in fitting.items() if scheme.block and scheme.dtype == "fp32"]
    lookups = [name for name in wanted if isinstance(model.get_submodule(name), nn.Embedding)]
    found, looked_at = dict[str, Quantized](), dict[Any, dict[str, Quantized]]()
    for group in [*groups(model, [name for name in wanted if name not in lookups]), *([name] for name in lookups)]:
        if len({fitting[name] for name in group}) == 1:
            weights = {name: rows(model.get_submodule(name)) for name in group}
            tensors = tuple(weight.data_ptr() for weight in weights.values()), fitting[group[0]]
            if tensors not in looked_at:  # a head may be the embedding
                looked_at[tensors] = on_grid(weights, fitting[group[0]]) or {}
            found |= dict(zip(group, looked_at[tensors].values(), strict=False))
    return {name: each for name, each in found.items() if name not in lookups or each.offsets is None}


def on_grid(weights: dict[str, Tensor], scheme: Scheme) -> dict[str, Quantized] | None:
    """Weights `[N, K]` of products of one input by their own grid, None where one has none that the scheme can hold.

    All are in blocks of one size, the largest that does, and all symmetric, or with zeros, or with offsets.
    """
    columns = next(iter(weights.values())).shape[1]
    sizes = [scheme.block, *(size for size in BLOCKS if size < scheme.block)] if scheme.block else []
    for size in (size for size in sizes if columns % size == 0):
        grids = dict[str, _Grid]()
        for name, weight in weights.items():
            if (grid := _grid(weight, size, scheme.bits)) is None:
                break
            grids[name] = grid
        else:
            return next(found for place in _PLACES if (found := _placed(grids, scheme, size, place)))
    return None


def _grid(weight: Tensor, size: int, bits: int) -> _Grid | None:
    """The grid that all of a weight's blocks lie on."""
    blocks, parts = weight.reshape(len(weight), -1, size), list[_Grid]()
    if _codes(blocks[:_SAMPLE], bits) is None:
        return None
    for some in torch.split(blocks, _ROWS):
        part = _codes(some, bits)
        if part is None:
            return None
        parts.append(part)
    return _Grid(*(torch.cat([getattr(part, name) for part in parts]) for name in ("codes", "steps", "low")))


def _codes(blocks: Tensor, bits: int) -> _Grid | None:
    """The grid of blocks `[rows, blocks, size]`."""
    levels, size = (1 << bits) - 1, blocks.shape[-1]
    flat = blocks.reshape(-1, size)
    ordered = flat.sort(-1).values
    low, span = ordered[:, 0].double(), ordered[:, -1].double() - ordered[:, 0].double()
    gaps = ordered.diff(dim=-1)
    least = torch.where(gaps > _APART * span[:, None].float(), gaps, torch.inf).amin(-1).double()
    steps = torch.where(low == 0, 1.0, low.abs())  # a block of one number
    left = span.nonzero()[:, 0]
    for multiple in range(1, _MULTIPLES + 1):  # the largest step that fits
        counts, tried = span[left] * multiple / least[left], (least[left] / multiple).float()[:, None]
        if (counts >= levels + 0.5).any():  # of smaller steps it has still more
            return None
        codes = (flat[left] - ordered[left, :1]) / tried
        fits = ((codes - codes.round()).abs_() < _OFF).all(-1)
        steps[left[fits]] = (span[left] / counts.round())[fits]
        left = left[~fits]
    if len(left):
        return None
    codes = ((flat - ordered[:, :1]) / steps[:, None].float()).round_().byte()
    rows = blocks.shape[:2]
    return _Grid(codes.reshape(blocks.shape), steps.reshape(rows), low.reshape(rows))


def _placed(grids: dict[str, _Grid], scheme: Scheme, size: int, place: _Place) -> dict[str, Quantized] | None:
    """The grids of some weights with 0 where `place` puts it; None where it cannot for one of them."""
    found = dict[str, Quantized]()
    for name, grid in grids.items():
        placed = place(grid, scheme.bits)
        if placed is None:
            return None
        codes, scales, zeros, offsets = placed
        own = Scheme(scheme.kind, scheme.dtype, size, zeros is None, METHOD, scheme.activations)
        found[name] = Quantized(own, codes.byte(), scales.float(), zeros, offsets=offsets)
    return found


_Places = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # codes, scales, zeros, offsets
_Place = Callable[[_Grid, int], _Places | None]


def _in_the_middle(grid: _Grid, bits: int) -> _Places | None:
    """Of all blocks alike, as symmetric weights have it."""
    first, middle = grid.low / grid.steps, 1 << bits - 1
    start, most = first.round() + middle, grid.codes.amax(-1)
    fits = ((first - first.round()).abs() < _WHOLE) & (start >= 0) & (start + most < 1 << bits)
    return (grid.codes + start[..., None], grid.steps, None, None) if fits.all() else None


def _anywhere(grid: _Grid, bits: int) -> _Places | None:
    """At a whole number of each block, where it lies on the grid, or close to one of a grid some times as fine."""
    levels, most, first = (1 << bits) - 1, grid.codes.amax(-1).double(), grid.low / grid.steps
    off, finer, start = torch.full_like(first, torch.inf), torch.ones_like(first), torch.zeros_like(first)
    for multiple in range(1, levels // max(1, int(most.max())) + 1):
        tried = (first * multiple).round()
        fits = (tried >= -levels) & (tried.clamp(min=0) + multiple * most <= levels)
        apart = torch.where(fits, (first - tried / multiple).abs(), torch.inf)
        better = apart < off - _WHOLE
        off, start = torch.where(better, apart, off), torch.where(better, tried, start)
        finer = torch.where(better, multiple, finer)
    if off.max() > _NEAR[0] or (off**2).mean() > _NEAR[1] ** 2:
        return None
    codes = grid.codes * finer[..., None] + start.clamp(min=0)[..., None]
    return codes, grid.steps / finer, start.clamp(max=0).abs().byte(), None


def _beside(grid: _Grid, bits: int) -> _Places:
    """In no code: the middle's number is added to each block."""
    return grid.codes, grid.steps, None, (grid.low + (1 << bits - 1) * grid.steps).float()


_PLACES: tuple[_Place, ...] = (_in_the_middle, _anywhere, _beside)
