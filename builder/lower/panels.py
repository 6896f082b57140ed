"""Packs weights into panels of 16 columns, as the operators of `plugins/cpu/products.h` read them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

COLUMNS = 16  # of a panel


def pack_codes(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Pack codes `[N, K]` of 4 or 8 bits, one a byte, into `[panels, bytes]`; K is a multiple of 8.

    A panel has 64 bytes for every 4 codes of k, 4 of each column; of 4 bits for every 8, the second four in the high
    halves. Columns after the last have code 0.
    """
    columns = _whole_panels(codes)
    panels, inner = len(columns) // COLUMNS, columns.shape[1]
    if bits == 4:
        halves = columns.reshape(len(columns), inner // 8, 2, 4)
        columns = (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(len(columns), inner // 2)
    fours = columns.reshape(panels, COLUMNS, -1, 4)
    return np.ascontiguousarray(fours.transpose(0, 2, 1, 3)).reshape(panels, -1)


def pack_floats(weight: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Pack a float32 weight `[N, K]` into `[panels, bytes]`: 16 columns of every k."""
    columns = _whole_panels(weight).reshape(-1, COLUMNS, weight.shape[1])
    return np.ascontiguousarray(columns.transpose(0, 2, 1)).reshape(len(columns), -1).view(np.uint8)


def pack_factors(factors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Pack scales or minima `[N, blocks]` into `[panels, blocks, 16]`."""
    columns = _whole_panels(factors).reshape(-1, COLUMNS, factors.shape[1])
    return np.ascontiguousarray(columns.transpose(0, 2, 1))


def _whole_panels(rows: NDArray[Any]) -> NDArray[Any]:
    """Append rows of 0 until they fill a panel."""
    return np.pad(rows, ((0, -len(rows) % COLUMNS), (0, 0)))
