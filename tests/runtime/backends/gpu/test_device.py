"""What decodes on a device finds its tensors there: parts of a cache, room for a prompt's chunk, a table of pages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from host_device import HostDevice

from specbuild.runtime.backends.gpu.device import MAX_NODES, PageTable, Tensor
from specbuild.runtime.backends.gpu.pages import Pages


@pytest.fixture
def device() -> HostDevice:
    return HostDevice()


def test_a_page_table_is_copied_when_it_is_old(device: HostDevice) -> None:
    pages, stream = Pages(3, 96, 16, 11), device.stream()
    table = PageTable(device, pages)
    assert not table.stale
    np.testing.assert_array_equal(device.array(table.tensor), 0)
    for take in ((1, 1, 0, 40), (0, 1, 16, 80)):  # which begins with one of its pages
        assert pages.take(*take)
        assert table.stale
        table.update(stream)
        assert not table.stale
        np.testing.assert_array_equal(device.array(table.tensor), pages.table)
        pages.release(1, 20)
    assert pages.table[0, 0] == pages.table[1, 0] > 0


@pytest.mark.parametrize(("capacity", "apart"), [(96, 256), (16 * 64, 256), (16 * 65, 512)])
def test_a_slots_row_of_a_page_table_lies_where_tensorrt_wants_it(
    device: HostDevice, capacity: int, apart: int
) -> None:
    """Rows by themselves are as long, in whole 256 bytes."""
    pages = Pages(3, capacity, 16, 3 * capacity // 16)
    table = PageTable(device, pages)
    for slot in (2, 0):
        assert pages.take(slot, slot, 0, capacity)
    table.update(device.stream())
    assert np.diff([table.row(slot) for slot in range(3)]).tolist() == [apart, apart]
    rows = [device.array(Tensor(table.row(slot), (capacity // 16,), np.dtype(np.int32))) for slot in range(3)]
    np.testing.assert_array_equal(rows, pages.table)


def test_a_tree_has_as_many_nodes_as_the_kernels_take() -> None:
    header = (Path(__file__).parents[4] / "plugins" / "kernels.h").read_text(encoding="utf-8")
    assert f"#define SPECBUILD_MOST_NODES {MAX_NODES} " in header
