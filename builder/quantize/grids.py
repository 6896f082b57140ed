"""Detects weights that already lie on a quantization grid, as those of a GGUF, GPTQ or AWQ checkpoint do.

On such a grid a block's values are `low + step · code`. GGUF's Q4_0 and Q8_0 store a step for each block, Q4_1 also its
lowest value (ggml's `quants.c`); GPTQ and AWQ store a step and an integer zero point. A dequantized checkpoint has lost
these, but they follow from its values. Here they are recovered and kept, instead of rounding the values once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from specbuild.builder.config.scheme import BLOCKS, Scheme
from specbuild.builder.frontend.layer_by_layer import LayeredModel
from specbuild.builder.frontend.lazy_weights import Weight

from .calibrate import CalibrationCache, NumbersByName
from .linears import Names, groups, row_weight
from .numbers import Numbers, Quantized, fit
from .own_blocks import OwnBlocks, own_blocks

METHOD = "grid"
_APART = 1e-3  # values of a block that differ by less than this fraction of its range are equal
_OFF = 0.02  # fraction of a step by which rounding may have moved a value
_WHOLE = 1e-4  # fraction of a step by which 0 may be off a grid that contains it
_NEAR = 0.04, 0.01  # fraction of a step by which 0 may be off a grid with zero points: maximum, root mean square
_MULTIPLES = 6  # maximum number of steps between a block's two closest values
_SAMPLE = 64  # rows that are tried before all others
_ROWS = 4096  # rows at a time


class _Grid(NamedTuple):
    """A weight's grid: codes from 0 on, uint8 `[N, blocks, size]`; steps and lowest values, float64 `[N, blocks]`."""

    codes: Tensor
    steps: Tensor
    low: Tensor


def own_grids(
    model: LayeredModel, names: Names, schemes: Mapping[str, Scheme], cache: CalibrationCache | None = None
) -> NumbersByName:
    """Return, by name, the weights that are quantized already, in a form that their scheme can hold.

    That is the blocks of their file, or else a grid on which they lie. Only schemes with blocks that compute in float32
    can hold one. Linear layers that share an input must all have the same kind of grid.

    Args:
        model: The float32 model.
        names: Its weights.
        schemes: The scheme of each weight, by name.
        cache: The folder for what is found; None: memory holds it.
    """
    columns = {name: row_weight(model, name).shape[1] for name in schemes}
    fitting = {name: fit(scheme, columns[name]) for name, scheme in schemes.items()}
    wanted = [name for name, scheme in fitting.items() if scheme.block and scheme.dtype == "fp32"]
    blocks = own_blocks(model.weights, names, schemes=fitting)
    lookups = [name for name in wanted if isinstance(model.net.get_submodule(name), nn.Embedding)]
    found, looked_at = dict[str, Numbers](), dict[Any, list[Numbers]]()
    for group in [*groups(model, [name for name in wanted if name not in lookups]), *([name] for name in lookups)]:
        if all(name in blocks for name in group) and len({blocks[name].scheme for name in group}) == 1:
            found |= {name: blocks[name] for name in group}
        elif len({fitting[name] for name in group}) == 1:
            weights, scheme = {name: row_weight(model, name) for name in group}, fitting[group[0]]
            tensors = tuple(map(id, weights.values())), scheme
            if tensors not in looked_at:  # a tied head is the embedding
                looked_at[tensors] = list(_cached_or_new(weights, scheme, cache).values())
            found |= dict(zip(group, looked_at[tensors], strict=False))
    return {name: each for name, each in found.items() if name not in lookups or _is_looked_up(each)}


def _is_looked_up(found: Numbers) -> bool:
    """Return whether an embedding keeps its numbers: a file's blocks, or a grid without offsets."""
    return isinstance(found, OwnBlocks) or "offsets" not in found.parts


def _cached_or_new(weights: Mapping[str, Weight], scheme: Scheme, cache: CalibrationCache | None) -> NumbersByName:
    """Return weights on their own grid, as the cache has them or keeps them; nothing if there is none."""
    part = "grid-" + next(iter(weights))
    if cache and (cached := cache.load(part, list(weights))) is not None:
        return cached
    found = on_grid(weights, scheme) or {}
    return cache.save(part, found) if cache and found else found


def on_grid(weights: Mapping[str, Weight], scheme: Scheme) -> dict[str, Quantized] | None:
    """Quantize weights `[N, K]` of linear layers that share an input on their own grid; None if one has none.

    All get the same block size, the largest that fits, and all are symmetric, have zero points, or have offsets.
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
            return next((found for place in _PLACES if (found := _placed(grids, scheme, size, place))), None)
    return None


def _grid(weight: Weight, size: int, bits: int) -> _Grid | None:
    """Return the grid of a weight in blocks of `size`, or None if one block lies on none."""
    rows, parts = weight.shape[0], list[_Grid]()
    for some in (slice(_SAMPLE), *(slice(at, at + _ROWS) for at in range(0, rows, _ROWS))):
        numbers = weight.read(some)
        if (part := _codes(numbers.reshape(len(numbers), -1, size), bits)) is None:
            return None
        parts.append(part)
    return _Grid(*map(torch.cat, zip(*parts[1:], strict=True)))


def _codes(blocks: Tensor, bits: int) -> _Grid | None:
    """Return the grid of blocks `[rows, blocks, size]`, or None if one of them lies on none."""
    levels, size = (1 << bits) - 1, blocks.shape[-1]
    flat = blocks.reshape(-1, size)
    ordered = flat.sort(-1).values
    low, span = ordered[:, 0].double(), ordered[:, -1].double() - ordered[:, 0].double()
    gaps = ordered.diff(dim=-1)
    least = torch.where(gaps > _APART * span[:, None].float(), gaps, torch.inf).amin(-1).double()
    steps = torch.where(low == 0, 1.0, low.abs())  # for a block of equal values
    left = span.nonzero()[:, 0]
    for multiple in range(1, _MULTIPLES + 1):  # larger steps first
        counts, tried = span[left] * multiple / least[left], (least[left] / multiple).float()[:, None]
        if (counts >= levels + 0.5).any():  # smaller steps need even more codes
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
    """Quantize weights on their grids, with zero points chosen by `place`; None if it cannot for one of them."""
    found = dict[str, Quantized]()
    for name, grid in grids.items():
        if (placed := place(grid, scheme.bits)) is None:
            return None
        codes, scales, zeros, offsets = placed
        own = Scheme(scheme.kind, scheme.dtype, size, zeros is None, METHOD, scheme.activations)
        found[name] = Quantized(own, codes.byte(), scales.float(), zeros, offsets=offsets)
    return found


_Places = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # codes, scales, zeros, offsets
_Place = Callable[[_Grid, int], _Places | None]


def _in_the_middle(grid: _Grid, bits: int) -> _Places | None:
    """Put 0 at the middle code of every block, as symmetric weights have it."""
    first, middle = grid.low / grid.steps, 1 << bits - 1
    start, largest = first.round() + middle, grid.codes.amax(-1)
    fits = ((first - first.round()).abs() < _WHOLE) & (start >= 0) & (start + largest < 1 << bits)
    return (grid.codes + start[..., None], grid.steps, None, None) if fits.all() else None


def _anywhere(grid: _Grid, bits: int) -> _Places | None:
    """Give each block a zero point, if 0 lies on its grid or close to it."""
    levels, first = (1 << bits) - 1, grid.low / grid.steps
    start, above = first.round(), first.round().clamp(min=0)
    off = first - start
    if (start < -levels).any() or (above + grid.codes.amax(-1) > levels).any():
        return None
    if off.abs().max() > _NEAR[0] or (off**2).mean() > _NEAR[1] ** 2:
        return None
    return grid.codes + above[..., None], grid.steps, start.clamp(max=0).abs().byte(), None


def _beside(grid: _Grid, bits: int) -> _Places | None:
    """Give each block the zero point nearest to 0, and an offset by the rest."""
    zeros = (-grid.low / grid.steps).round().clamp(0, (1 << bits) - 1)
    return grid.codes, grid.steps, zeros.byte(), (grid.low + zeros * grid.steps).float()


_PLACES: tuple[_Place, ...] = (_in_the_middle, _anywhere, _beside)
