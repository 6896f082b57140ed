"""The store: bounded, apart by tenant, whole after a kill."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from specbuild.runtime.errors import OptionError
from specbuild.serve.agents.store import Store


def test_it_is_bounded_by_number_and_bytes() -> None:
    store = Store(max_responses=3, max_bytes=100)
    for number in range(5):
        store.put("a", str(number), number)
    assert [store.get("a", str(number)) for number in range(5)] == [None, None, 2, 3, 4]
    assert store.put("a", "large", "x" * 90)
    assert [store.get("a", str(number)) for number in (3, 4)] == [3, 4]
    store.put("a", "larger", "x" * 95)
    assert [store.get("a", number) for number in ("4", "large")] == [None, None]
    assert store.get("a", "larger") == "x" * 95
    assert not store.put("a", "too large", "x" * 200)


def test_a_file_is_its_owners_and_of_responses(tmp_path: Path) -> None:
    path = tmp_path / "kept.db"
    Store(path).close()
    assert path.stat().st_mode & 0o777 == 0o600
    other, text = tmp_path / "other.db", tmp_path / "text"
    with sqlite3.connect(other) as base:
        base.execute("CREATE TABLE mine (x)")
    text.write_text("no database at all, and longer than a header of one hundred bytes is" * 3)
    for wrong in (other, text, tmp_path / "none" / "kept.db"):
        with pytest.raises(OptionError, match="give another file"):
            Store(wrong)
