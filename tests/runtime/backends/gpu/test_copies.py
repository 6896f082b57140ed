"""Copies that are not contiguous have the geometry that CUDA's driver wants: done by NumPy, they move those rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbuild.runtime.backends.gpu.copies import row_copy, strided_copy
from specbuild.runtime.backends.gpu.device import Tensor

CACHE = (6, 2, 3, 20, 4)  # [2 · layers, slots, heads, rows, D]


def copied(move: Any, data: np.ndarray) -> None:
    """What the driver's manual says such a copy does, done by NumPy."""
    flat = data.reshape(-1).view(np.uint8)
    for z in range(move.Depth):
        for y in range(move.Height):
            source, at = (
                ((z + z0) * height + y + y0) * pitch + x
                for x, y0, z0, pitch, height in (
                    (move.srcXInBytes, move.srcY, move.srcZ, move.srcPitch, move.srcHeight),
                    (move.dstXInBytes, move.dstY, move.dstZ, move.dstPitch, move.dstHeight),
                )
            )
            flat[at : at + move.WidthInBytes] = flat[source : source + move.WidthInBytes]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
def test_a_row_copy_is_of_those_rows_in_all_layers_and_heads(dtype: type) -> None:
    """Rows one after the other to others of their slot, and several at once to another slot."""
    driver = pytest.importorskip("cuda.bindings.driver")
    cache = np.random.default_rng(0).integers(0, 256, CACHE).astype(dtype)
    data, tensor = cache.copy(), Tensor(1 << 32, CACHE, cache.dtype)
    for to, row in enumerate([5, 6, 9, 19], 4):
        move = row_copy(driver, tensor, (1, row), (1, to), 1)
        assert int(move.srcDevice) == int(move.dstDevice) == 1 << 32
        copied(move, data)
    expected = cache.copy()
    expected[:, 1, :, 4:8] = cache[:, 1][:, :, [5, 6, 9, 19]]
    np.testing.assert_array_equal(data, expected)
    copied(row_copy(driver, tensor, (1, 2), (0, 7), 5), data)
    cache[:, 0, :, 7:12] = data[:, 1, :, 2:7]
    np.testing.assert_array_equal(data[:, 0], cache[:, 0])


@given(st.data())
def test_a_row_copy_moves_nothing_else_whatever_the_caches_shape(data: st.DataObject) -> None:
    """Up to whole slots, from the first row or to the last one."""
    driver = pytest.importorskip("cuda.bindings.driver")
    shape = tuple(data.draw(st.tuples(*(st.integers(1, most) for most in (4, 3, 3, 6, 3)))))
    count = data.draw(st.integers(1, shape[3]))
    places = st.tuples(st.integers(0, shape[1] - 1), st.integers(0, shape[3] - count))
    source, to = data.draw(places), data.draw(places)
    cache = np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)
    found, expected = cache.copy(), cache.copy()
    expected[:, to[0], :, to[1] : to[1] + count] = cache[:, source[0], :, source[1] : source[1] + count]
    overlap = source[0] == to[0] and abs(source[1] - to[1]) < count
    if overlap:  # which `Device.move_rows` does not allow
        return
    copied(row_copy(driver, Tensor(1 << 32, shape, cache.dtype), source, to, count), found)
    np.testing.assert_array_equal(found, expected)


def test_a_strided_copy_has_the_rows_of_the_shorter_in_the_longer() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    to, source = Tensor(1 << 32, (3, 64), np.dtype(np.int32)), Tensor(1 << 33, (3, 5), np.dtype(np.int32))
    copy = strided_copy(driver, to, source)
    assert (int(copy.srcDevice), copy.srcPitch, int(copy.dstDevice), copy.dstPitch) == (1 << 33, 20, 1 << 32, 256)
    assert (copy.WidthInBytes, copy.Height) == (20, 3)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.float64])
def test_a_strided_copy_leaves_the_ends_of_longer_rows_alone(dtype: type) -> None:
    """Further rows too; rows of equal length are one copy of them all."""
    driver = pytest.importorskip("cuda.bindings.driver")
    rng = np.random.default_rng(1)
    for there, here in (((4, 9), (3, 5)), ((2, 5), (2, 5)), ((3, 2, 8), (3, 7))):
        to, source = (rng.integers(1, 99, shape).astype(dtype) for shape in (there, here))
        tensors = [Tensor(1 << 32, array.shape, array.dtype) for array in (to, source)]
        copy, expected = strided_copy(driver, *tensors), to.copy()
        lines = expected.reshape(there[0], -1)
        lines[: here[0], : here[1]] = source
        for line in range(copy.Height):
            begins = [
                array.reshape(-1).view(np.uint8)[line * pitch :]
                for array, pitch in ((to, copy.dstPitch), (source, copy.srcPitch))
            ]
            begins[0][: copy.WidthInBytes] = begins[1][: copy.WidthInBytes]
        np.testing.assert_array_equal(to, expected)
