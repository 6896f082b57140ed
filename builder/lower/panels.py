"""Packs weights into panels of 16 columns, as the operators of `plugins/cpu/products.h` read them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbuild.builder.config.scheme import STEP

COLUMNS = 16  # of a panel
GROUPS = {4: 8, 5: 32, 6: 16}  # codes that are packed together, by their bits


def pack_codes(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Pack codes `[N, K]` of 4, 5, 6 or 8 bits, one a byte, into `[panels, bytes]`; K is whole groups of codes.

    A panel has 64 bytes for every 4 codes of k, 4 of each column; of 4 bits for every 8, the second four in the high
    halves. Of 5 and 6 bits, the low 4 bits of a group of 32 or 16 codes are followed by 64 bytes of the others. Columns
    after the last have code 0.
    """
    columns = _whole_panels(codes)
    if bits < 8:
        columns = _packed_groups(columns.reshape(-1, GROUPS[bits]), bits)
    fours = columns.reshape(-(-len(codes) // COLUMNS), COLUMNS, -1, 4)
    return np.ascontiguousarray(fours.transpose(0, 2, 1, 3)).reshape(len(fours), -1)


def _packed_groups(groups: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Pack groups of codes `[n, size]` of fewer than 8 bits into `[n, bytes]`."""
    halves = groups.reshape(len(groups), -1, 2, 4)
    low = np.asarray((halves[:, :, 0] & 15) | halves[:, :, 1] << 4, dtype=np.uint8).reshape(len(groups), -1)
    if bits == 4:
        return low
    fours = groups.reshape(len(groups), -1, 4) >> 4
    shifts = np.arange(0, 8, bits - 4, dtype=np.uint8)[:, None]
    high: NDArray[np.uint8] = np.bitwise_or.reduce(fours << shifts, axis=1)
    return np.concatenate([low, high], axis=1)


def pack_floats(weight: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Pack a float32 weight `[N, K]` into `[panels, bytes]`: 16 columns of every k."""
    columns = _whole_panels(weight).reshape(-1, COLUMNS, weight.shape[1])
    return np.ascontiguousarray(columns.transpose(0, 2, 1)).reshape(len(columns), -1).view(np.uint8)


def pack_factors(block: int, *factors: NDArray[Any]) -> NDArray[np.uint8]:
    """Pack scales, minima and steps `[N, count]` in the types that they have into `[panels, bytes]`.

    For every 256 columns of k in turn there are the scales of their blocks, their minima and their steps.
    """
    blocks, of_step = factors[0].shape[1], STEP // block
    widths = [of_step if each.shape[1] == blocks else 1 for each in factors]
    parts = [
        _packed_factors(each[:, step * width : (step + 1) * width])
        for step in range(-(-blocks // of_step))
        for each, width in zip(factors, widths, strict=True)
    ]
    return np.concatenate(parts, axis=1)


def _packed_factors(factors: NDArray[Any]) -> NDArray[np.uint8]:
    columns = _whole_panels(factors).reshape(-1, COLUMNS, factors.shape[1])
    return np.ascontiguousarray(columns.transpose(0, 2, 1)).reshape(len(columns), -1).view(np.uint8)


def _whole_panels(rows: NDArray[Any]) -> NDArray[Any]:
    """Append rows of 0 until they fill a panel."""
    return np.pad(rows, ((0, -len(rows) % COLUMNS), (0, 0)))
