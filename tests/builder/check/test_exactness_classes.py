"""What a build promises of its tokens: the class of its target here, and the bound of side branches."""

from __future__ import annotations

from pathlib import Path

import pytest

from specbuild.builder.check import exactness_classes
from specbuild.builder.check.exactness_classes import branch_rounding, record
from specbuild.runtime import Bundle
from specbuild.runtime.backends.cpu.cores import cores
from specbuild.runtime.backends.exactness import ExactnessClass

TEXTS = [list(range(5, 60)), [7, 7, 9] * 12]


@pytest.mark.slow
def test_a_record_is_of_all_graphs_and_what_the_manifest_has(bundle: Path) -> None:
    found = record(bundle)
    assert [found] == Bundle.open(bundle).manifest.exactness
    assert (found.rows >= 1, found.sequence_rows >= 1, found.machine["threads"]) == (True, True, cores())


@pytest.mark.parametrize("where", ["class", "bits"])
def test_graphs_that_disagree_have_no_class(bundle: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    odd = None if where == "class" else ExactnessClass(1, 2, "b")
    classes = iter([ExactnessClass(1, 2, "a"), odd, ExactnessClass(1, 2, "a")])
    monkeypatch.setattr(exactness_classes, "find", lambda executor, first: next(classes))
    found = record(bundle)
    assert (found.rows, found.sequence_rows, found.digest) == (0, 0, "")


def test_side_branches_of_float32_are_off_by_little_but_by_something(bundle: Path) -> None:
    assert 0 < branch_rounding(bundle, TEXTS) < 1e-4


@pytest.mark.parametrize("short", [6, 10])
def test_a_text_may_end_where_the_cache_does(bundle: Path, short: int) -> None:
    """No branch lies beyond it, nor do the rows that its step is filled up with."""
    rows = Bundle.open(bundle).manifest.models["target"].capacity
    text = [5 + i % 50 for i in range(rows - short)]
    assert 0 < branch_rounding(bundle, [text]) < 1e-3
