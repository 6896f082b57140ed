"""A file is written whole or not at all; folders are in test_pipeline.py."""

from pathlib import Path

import pytest

from specbuild.runtime.bundle.atomic_output import write
from specbuild.runtime.errors import OutputError


def test_a_file_is_whole_or_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    write(path, b"old")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_where_a_file_cannot_go(tmp_path):
    for path in (tmp_path, tmp_path / "no" / "x.json"):
        with pytest.raises(OutputError):
            write(path, b"x")
    assert list(tmp_path.iterdir()) == []
