"""Copies that are not contiguous have the geometry that CUDA's driver wants: done by NumPy, they move those rows."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from specbuild.runtime.backends.gpu.copies import row_copy, strided_copy
from specbuild.runtime.backends.gpu.device import Tensor


def copied(move, data):
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


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.float64])
@pytest.mark.parametrize(("there", "here"), [((4, 9), (3, 5)), ((2, 5), (2, 5)), ((3, 2, 8), (3, 7))])
def test_a_strided_copy_leaves_the_ends_of_longer_rows_alone(there, here, dtype):
    """Further rows too; rows of equal length are one copy of them all."""
    driver = pytest.importorskip("cuda.bindings.driver")
    to, source = np.zeros(there, dtype), np.arange(1, 1 + np.prod(here)).astype(dtype).reshape(here)
    copy = strided_copy(driver, *(Tensor(at << 32, array.shape, array.dtype) for at, array in ((2, to), (1, source))))
    assert (int(copy.dstDevice), int(copy.srcDevice)) == (2 << 32, 1 << 32)
    expected = to.copy()
    expected.reshape(there[0], -1)[: here[0], : here[1]] = source
    written, read = (array.reshape(-1).view(np.uint8) for array in (to, source))
    for line in range(copy.Height):
        written[line * copy.dstPitch :][: copy.WidthInBytes] = read[line * copy.srcPitch :][: copy.WidthInBytes]
    np.testing.assert_array_equal(to, expected)


@given(st.data(), st.sampled_from([np.uint8, np.uint16, np.float32]))
def test_a_row_copy_moves_those_rows_and_nothing_else(data, dtype):
    """Whatever the cache's shape, up to whole slots, from the first row or to the last one."""
    driver = pytest.importorskip("cuda.bindings.driver")
    shape = tuple(data.draw(st.tuples(*(st.integers(1, most) for most in (4, 3, 3, 6, 3)))))
    count = data.draw(st.integers(1, shape[3]))
    places = st.tuples(st.integers(0, shape[1] - 1), st.integers(0, shape[3] - count))
    (slot, row), (other, to) = source, target = data.draw(places), data.draw(places)
    assume(slot != other or abs(row - to) >= count)  # which `Device.move_rows` does not allow
    cache = np.arange(np.prod(shape)).astype(dtype).reshape(shape)
    found, expected = cache.copy(), cache.copy()
    expected[:, other, :, to : to + count] = cache[:, slot, :, row : row + count]
    copy = row_copy(driver, Tensor(1 << 32, shape, cache.dtype), source, target, count)
    assert int(copy.srcDevice) == int(copy.dstDevice) == 1 << 32
    copied(copy, found)
    np.testing.assert_array_equal(found, expected)
