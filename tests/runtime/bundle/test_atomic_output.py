"""A file is written whole or not at all; folders are in test_pipeline.py."""

import ctypes
import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from specbuild.runtime.bundle.atomic_output import check_output, staging, write
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


def test_a_folder_that_cannot_be_written_is_one_line_and_leaves_nothing(tmp_path):
    """What does not fit is refused before anything is written, a full disk as soon as it is full."""
    with pytest.raises(OutputError, match="MiB free, this may take"), staging(tmp_path / "x", 1 << 60):
        raise AssertionError
    with pytest.raises(OutputError, match="the disk is full: free some"), staging(tmp_path / "no" / "x", 1):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(OutputError, match="File name too long"):
        check_output(tmp_path / ("x" * 300), force=False)
    assert list(tmp_path.iterdir()) == []


def test_parents_that_others_use_meanwhile_stay(tmp_path):
    with pytest.raises(OutputError), staging(tmp_path / "a" / "b" / "x", 1, (tmp_path / "a" / "theirs").mkdir):
        pass
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["theirs"]


def test_a_system_that_cannot_forbid_to_replace_gets_the_folder_too(tmp_path, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace())
    with staging(tmp_path / "x", 1) as folder:
        (folder / "manifest.json").write_text("new")
    assert (tmp_path / "x" / "manifest.json").read_text() == "new"
