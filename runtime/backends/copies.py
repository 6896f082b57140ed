"""Copies that are not contiguous, as CUDA's driver takes them."""

from __future__ import annotations

from typing import Any

from .device import Tensor


def row_copy(driver: Any, cache: Tensor, slot: int, row: int, to: int) -> Any:
    """A copy of one cache row to another, of all layers and heads of a slot, as the driver takes it.

    Seen as planes of B · heads lines, S · D numbers long: one plane a layer's keys or values, one line a head.
    """
    layers, slots, heads, rows, width = cache.shape
    size = cache.dtype.itemsize
    move = driver.CUDA_MEMCPY3D()
    for side, at in (("src", row), ("dst", to)):
        setattr(move, f"{side}MemoryType", driver.CUmemorytype.CU_MEMORYTYPE_DEVICE)
        setattr(move, f"{side}Device", cache.address)
        setattr(move, f"{side}Pitch", rows * width * size)
        setattr(move, f"{side}Height", slots * heads)
        setattr(move, f"{side}XInBytes", at * width * size)
        setattr(move, f"{side}Y", slot * heads)
    move.WidthInBytes, move.Height, move.Depth = width * size, heads, layers
    return move


def strided_copy(driver: Any, to: Tensor, source: Tensor) -> Any:
    """A copy of the rows of `source` to the beginnings of those of `to`, as the driver takes it."""
    copy = driver.CUDA_MEMCPY2D()
    for side, tensor in (("src", source), ("dst", to)):
        setattr(copy, f"{side}MemoryType", driver.CUmemorytype.CU_MEMORYTYPE_DEVICE)
        setattr(copy, f"{side}Device", tensor.address)
        setattr(copy, f"{side}Pitch", tensor.nbytes // tensor.shape[0])
    copy.WidthInBytes, copy.Height = source.nbytes // source.shape[0], source.shape[0]
    return copy
