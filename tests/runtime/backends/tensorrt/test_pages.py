"""The pool of pages: whatever is taken, shared, released and evicted, every page has one writer and none is lost."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from host_device import HostDevice
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.runtime.backends.gpu.device import Tensor
from specbuild.runtime.backends.tensorrt.pages import PagePool, PageTable

ROWS, SLOTS, CAPACITY = 4, 4, 32


class Texts:
    """A pool, and beside it what each slot's rows hold: who wrote those that are committed, and who those of a page."""

    def __init__(self, count):
        self.pool, self.count = PagePool(SLOTS, CAPACITY, ROWS, count), count
        self.memory: dict[tuple[int, int], int] = {}
        self.text: list[list[int]] = [[] for _ in range(SLOTS)]  # of rows that are committed
        self.limit = [0] * SLOTS  # of slots that are decoded; 0: idle
        self.number = 0

    def place(self, slot, row):
        return int(self.pool.table[slot, row // ROWS]), row % ROWS

    def take(self, slot, source, common, most):
        kept = min(len(self.text[source]), len(self.pool.of[source]) * ROWS)
        rows = self.pool.usable(slot, source, min(common, kept, most - 1))
        assert rows <= common
        before = self.pool.version, self.pool.table.copy(), [list(pages) for pages in self.pool.of]
        text = self.text[source][:rows]
        if not self.pool.take(slot, source, rows, most):
            np.testing.assert_array_equal(before[1], self.pool.table)
            assert before[0] == self.pool.version
            assert before[2] == self.pool.of
            return False
        assert self.pool.version > before[0]
        self.text[slot], self.limit[slot] = text, most
        assert len(self.pool.of[slot]) == self.pool.needed(most)
        return True

    def write(self, slot, rows):
        """Commit some rows more; into pages that nobody else has."""
        for row in range(len(self.text[slot]), min(len(self.text[slot]) + rows, self.limit[slot])):
            page = self.place(slot, row)[0]
            assert page > 0
            assert sum(page in pages for pages in self.pool.of) == 1, "a page has two writers"
            self.number += 1
            self.memory[self.place(slot, row)] = self.number
            self.text[slot].append(self.number)

    def check(self):
        """What is kept is as it was written; counts are right; nothing leaks."""
        held = Counter(page for pages in self.pool.of for page in pages)
        assert {*held} <= {*range(1, self.count + 1)}
        for slot, pages in enumerate(self.pool.of):
            assert self.pool.table[slot].tolist() == pages + [0] * (CAPACITY // ROWS - len(pages))
            kept = self.text[slot][: len(pages) * ROWS]
            assert [self.memory[self.place(slot, row)] for row in range(len(kept))] == kept
            if self.limit[slot]:
                assert kept == self.text[slot], "a slot that is decoded lost a page"


@settings(max_examples=80)
@given(st.data(), st.integers(1, 40))
def test_pages_are_nobody_elses(data, count):
    texts, slots = Texts(count), st.integers(0, SLOTS - 1)
    for _ in range(data.draw(st.integers(1, 30))):
        slot = data.draw(slots)
        if texts.limit[slot] == 0:
            texts.take(slot, data.draw(slots), data.draw(st.integers(0, CAPACITY)), data.draw(st.integers(1, CAPACITY)))
        elif data.draw(st.booleans()):
            texts.write(slot, data.draw(st.integers(1, 9)))
        else:
            spoiled = data.draw(st.booleans())
            rows = 0 if spoiled else len(texts.text[slot])
            texts.text[slot], texts.limit[slot] = texts.text[slot][:rows], 0
            texts.pool.release(slot, rows, spoiled)
        texts.check()
    for slot in range(SLOTS):
        if texts.limit[slot]:
            texts.limit[slot] = 0
            texts.pool.release(slot, len(texts.text[slot]))
    if count >= CAPACITY // ROWS:
        assert texts.take(0, 0, 0, CAPACITY), "what is idle is no room"
    texts.check()


def taken(pool, slot, most, source=0, rows=0):
    assert pool.take(slot, source, rows, most)
    return pool.of[slot]


def test_what_may_be_no_number_is_erased_once():
    pool = PagePool(3, 32, 4, 8)
    failing = list(taken(pool, 0, 20))
    taken(pool, 1, 12, 0, 8)  # has two of its pages, which are sound
    pool.release(0, 0, spoiled=True)
    assert pool.of[0] == []
    assert pool.spoiled(1) == []
    taken(pool, 2, 8)  # from what was freed last
    pool.release(2, 0)  # cancelled before it began
    taken(pool, 2, 20)
    assert {*failing[2:]} <= {*pool.of[2]}
    assert sorted(pool.spoiled(2)) == sorted(failing[2:])
    assert pool.spoiled(2) == []


@pytest.fixture
def device():
    return HostDevice()


def test_a_page_table_is_copied_when_it_is_old(device):
    table, stream = PageTable(device, 3, 96, 16, 11), device.stream()
    assert not table.stale
    np.testing.assert_array_equal(device.array(table.tensor), 0)
    for take in ((1, 1, 0, 40), (0, 1, 16, 80)):  # which begins with one of its pages
        assert table.take(*take)
        assert table.stale
        table.update(stream)
        assert not table.stale
        np.testing.assert_array_equal(device.array(table.tensor), table.table)
        table.release(1, 20)
    assert table.table[0, 0] == table.table[1, 0] > 0


@pytest.mark.parametrize(("capacity", "apart"), [(96, 256), (16 * 64, 256), (16 * 65, 512)])
def test_a_slots_row_of_a_page_table_lies_where_tensorrt_wants_it(device, capacity, apart):
    """Rows by themselves are as long, in whole 256 bytes."""
    table = PageTable(device, 3, capacity, 16, 3 * capacity // 16)
    for slot in (2, 0):
        assert table.take(slot, slot, 0, capacity)
    table.update(device.stream())
    assert np.diff([table.line(slot) for slot in range(3)]).tolist() == [apart, apart]
    rows = [device.array(Tensor(table.line(slot), (capacity // 16,), np.dtype(np.int32))) for slot in range(3)]
    np.testing.assert_array_equal(rows, table.table)
