"""Descriptors of non-contiguous copies for the CUDA driver."""

from __future__ import annotations

from typing import Any

from .device import Place, Tensor


def row_copy(driver: Any, cache: Tensor, source: Place, to: Place, count: int) -> Any:
    """Return the driver's descriptor of a copy of `count` cache rows in all layers and heads.

    The cache is seen as planes of B · heads lines of S · D numbers: one plane per layer's keys or values, one line per
    head.
    """
    layers, slots, heads, rows, width = cache.shape
    size = cache.dtype.itemsize
    move = driver.CUDA_MEMCPY3D()
    for side, (slot, row) in (("src", source), ("dst", to)):
        setattr(move, f"{side}MemoryType", driver.CUmemorytype.CU_MEMORYTYPE_DEVICE)
        setattr(move, f"{side}Device", cache.address)
        setattr(move, f"{side}Pitch", rows * width * size)
        setattr(move, f"{side}Height", slots * heads)
        setattr(move, f"{side}XInBytes", row * width * size)
        setattr(move, f"{side}Y", slot * heads)
    move.WidthInBytes, move.Height, move.Depth = count * width * size, heads, layers
    return move


def strided_copy(driver: Any, to: Tensor, source: Tensor) -> Any:
    """Return the driver's descriptor of a copy of the rows of `source` to the beginnings of the rows of `to`."""
    copy = driver.CUDA_MEMCPY2D()
    for side, tensor in (("src", source), ("dst", to)):
        setattr(copy, f"{side}MemoryType", driver.CUmemorytype.CU_MEMORYTYPE_DEVICE)
        setattr(copy, f"{side}Device", tensor.address)
        setattr(copy, f"{side}Pitch", tensor.nbytes // tensor.shape[0])
    copy.WidthInBytes, copy.Height = source.nbytes // source.shape[0], source.shape[0]
    return copy
