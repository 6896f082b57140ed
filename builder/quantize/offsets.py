"""Makes the offsets of a weight's blocks columns of codes, for inputs that are followed by the sums of their blocks.

An offset adds to a product its value times the sum of its block's inputs. As columns of the same product it costs a
step no product of its own, and no floating-point numbers to read. Two codes hold an offset, as two digits do. The
second ones have another scale, of which a block has one, so they begin in a block of their own. To get there the sums
are repeated, which takes no operator of its own.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from .numbers import Quantized, joined


def rounded(offsets: Tensor, bits: int) -> Tensor:
    """Round offsets `[N, blocks]` to what two codes of so many bits hold."""
    counts, unit = _counted(offsets, bits)
    return (counts * unit).float()


def room(blocks: int, size: int) -> tuple[int, int]:
    """Return how often the sums of a weight's blocks follow its input, and how many blocks that adds to the weight."""
    copies = 1 + math.ceil(math.ceil(blocks / size) * size / blocks)
    return copies, math.ceil(copies * blocks / size)


def in_columns(part: Quantized) -> Quantized:
    """Return a weight whose offsets, which were rounded, are columns after all others; itself if it has none."""
    if part.offsets is None:
        return part
    (rows, blocks, size), levels = part.codes.shape, 1 << part.scheme.bits
    (copies, added), (counts, unit) = room(blocks, size), _counted(part.offsets, part.scheme.bits)
    digits, last = torch.zeros(rows, added * size), (copies - 1) * blocks
    digits[:, :blocks] = (counts / levels + 0.5).floor()
    digits[:, last : last + blocks] = counts - levels * digits[:, :blocks]
    codes, scales = (digits + levels // 2).byte().reshape(rows, added, size), unit.float().repeat(1, added)
    scales[:, : last // size] *= levels
    more = Quantized(part.scheme, codes, scales, torch.full_like(codes[..., 0], levels // 2))
    return joined([replace(part, offsets=None), more], 1)


def _counted(offsets: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return offsets as whole numbers of units `[N, 1]`, in which a row's largest has the largest first code alone."""
    levels = 1 << bits
    largest = offsets.double().abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    unit = largest / ((levels // 2 - 1) * levels)
    return (offsets / unit).round(), unit
