"""Logits in a temporary file are those that were written, and take memory for the text that is read."""

import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbuild.builder.frontend.logits_file import LogitsFile
from specbuild.runtime.errors import OutputError

SHAPES = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 7)), max_size=6)


@given(SHAPES, st.randoms(use_true_random=False), st.slices(6))
def test_every_text_is_read_as_it_was_written(shapes, random, some):
    rng = np.random.default_rng(random.getrandbits(32))
    wanted = [rng.standard_normal(shape[::-1]).astype(np.float32).T for shape in shapes]
    found = LogitsFile(iter(wanted))
    for _ in range(2):
        for ours, exact in zip(found, wanted, strict=True):
            assert np.array_equal(ours, exact)
    assert [each.shape for each in found[some]] == [each.shape for each in wanted[some]]
    if shapes:
        assert np.array_equal(found[-1], wanted[-1])
    with pytest.raises(IndexError):
        found[len(shapes)]


def test_memory_holds_one_text():
    size = 1 << 20
    tracemalloc.start()
    try:
        found = LogitsFile(np.full((1, size), number, np.float32) for number in range(8))
        assert [each[0, 0] for each in found] == list(range(8))
        assert tracemalloc.get_traced_memory()[1] < 3 * 4 * size
    finally:
        tracemalloc.stop()


def test_a_full_disk_is_told(monkeypatch):
    with Path("/dev/full").open("w+b", buffering=0) as full:
        monkeypatch.setattr(tempfile, "TemporaryFile", lambda: full)
        with pytest.raises(OutputError, match=r"takes no logits .*: set TMPDIR"):
            LogitsFile([np.zeros((1, 4), np.float32)])
