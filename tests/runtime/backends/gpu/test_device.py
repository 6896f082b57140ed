"""What decodes on a device finds its tensors there: parts of a cache, room for a prompt's chunk, a table of pages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from host_device import HostDevice

from specbuild.runtime.backends.executor import ModelSpec
from specbuild.runtime.backends.gpu.device import MAX_NODES, PageTable, Tensor, hidden_states, slot_parts
from specbuild.runtime.backends.gpu.pages import Pages

SPEC = ModelSpec("target", 2, 3, 4, 50, 20, 8)


@pytest.fixture
def device() -> HostDevice:
    return HostDevice()


@pytest.mark.parametrize("slot", [0, 1])
def test_a_slots_parts_are_its_keys_and_values_of_each_layer(device: HostDevice, slot: int) -> None:
    cache = device.empty((4, 2, 3, 5, 2), np.float16)
    whole = device.array(cache)
    whole[...] = np.arange(whole.size).reshape(whole.shape)
    parts = slot_parts(cache, slot)
    assert [part.shape for part in parts] == [(1, 3, 5, 2)] * 4
    for part, layer in zip(parts, whole, strict=True):
        np.testing.assert_array_equal(device.array(part)[0], layer[slot])
    assert slot_parts(cache) == slot_parts(cache, 0)


def test_hidden_states_are_made_for_those_who_have_any(device: HostDevice) -> None:
    assert hidden_states(device, SPEC, 2, 4, 8) == (None, None)
    made, read = hidden_states(device, replace(SPEC, hidden=6), 2, 4, 8)
    assert made is not None
    assert (made.shape, made.dtype, read) == ((2, 4, 6), np.float32, None)
    made, read = hidden_states(device, replace(SPEC, hidden=6, reads_hidden=True), 2, 4, 8)
    assert made is not None
    assert read is not None
    assert read.shape == made.shape
    assert read.address != made.address


def test_a_page_table_is_copied_when_it_is_old(device: HostDevice) -> None:
    pages, stream = Pages(3, 96, 16, 11), device.stream()
    table = PageTable(device, pages)
    assert not table.stale
    assert pages.take(1, 1, 0, 40)
    assert table.stale
    np.testing.assert_array_equal(device.array(table.tensor), 0)
    table.update(stream)
    assert not table.stale
    assert (pages.table[1] > 0).tolist() == [True] * 3 + [False] * 3
    np.testing.assert_array_equal(device.array(table.tensor), pages.table)
    pages.release(1, 20)
    assert pages.take(0, 1, 16, 80)  # which begins with one of its pages
    assert table.stale
    table.update(stream)
    assert pages.table[0, 0] == pages.table[1, 0] > 0
    np.testing.assert_array_equal(device.array(table.tensor), pages.table)


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
    starts = [table.row(slot) for slot in range(3)]
    assert np.diff(starts).tolist() == [apart, apart]
    for slot, start in enumerate(starts):
        row = device.array(Tensor(start, (capacity // 16,), np.dtype(np.int32)))
        np.testing.assert_array_equal(row, pages.table[slot])


def test_a_tree_has_as_many_nodes_as_the_kernels_take() -> None:
    header = (Path(__file__).parents[4] / "plugins" / "kernels.h").read_text(encoding="utf-8")
    assert f"#define SPECBUILD_MOST_NODES {MAX_NODES} " in header
