"""Memory that host and device both have: arrays in one piece, copied together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from specbuild.runtime.backends.gpu.device import Device, Tensor

_ALIGNMENT = 16


class Block:
    """Arrays in one piece of device memory with a pinned twin on the host, so that neighbours are copied together."""

    def __init__(self, device: Device, fields: Mapping[str, tuple[tuple[int, ...], DTypeLike]]) -> None:
        """`fields`: shape and dtype of each array, in the order in which they lie."""
        self._device, self._ends, end = device, dict[str, tuple[int, int]](), 0
        for name, (shape, dtype) in fields.items():
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = begin + math.prod(shape) * np.dtype(dtype).itemsize
            self._ends[name] = begin, end
        self._memory, self._twin = device.empty((end,), np.uint8), device.pinned((end,), np.uint8)
        self.host, self.at = dict[str, NDArray[Any]](), dict[str, Tensor]()
        for name, (shape, dtype) in fields.items():
            memory, twin = self._span(name, name)
            self.host[name] = twin.view(dtype).reshape(shape)
            self.at[name] = Tensor(memory.address, shape, np.dtype(dtype))

    def upload(self, first: str, last: str, stream: int) -> None:
        """Enqueue the copy of the fields from `first` to `last` to the device."""
        self._device.upload(*self._span(first, last), stream)

    def download(self, first: str, last: str, stream: int) -> None:
        """Enqueue the copy of the fields from `first` to `last` to the host."""
        self._device.download(*self._span(first, last)[::-1], stream)

    def upload_row(self, name: str, slot: int, stream: int) -> None:
        """Enqueue the copy of one slot's part of a field to the device."""
        row = self.host[name][slot : slot + 1]
        to = Tensor(self.at[name].address + slot * row.nbytes, row.shape, row.dtype)
        self._device.upload(to, row, stream)

    def _span(self, first: str, last: str) -> tuple[Tensor, NDArray[Any]]:
        begin, end = self._ends[first][0], self._ends[last][1]
        return Tensor(self._memory.address + begin, (end - begin,), np.dtype(np.uint8)), self._twin[begin:end]
