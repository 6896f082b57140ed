"""Files and folders of text become tokens, and what is no text is left out or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specbuild.builder.distill import texts
from specbuild.builder.frontend import checkpoint as checkpoints
from specbuild.runtime.errors import OptionError


def test_texts_are_of_files_and_folders(asked: Callable[..., Any], target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.md").write_text("alpha", encoding="utf-8")
    (folder / "deep" / "b.jsonl").write_text(json.dumps({"text": "beta"}) + "\n" + json.dumps({"prompt": "gamma"}))
    (folder / ".hidden").write_text("no")
    (folder / "c.bin").write_bytes(b"\xff\xfe\xfd")
    found = checkpoints.find(str(target))
    ids = texts.read([folder], found)
    assert [found.tokenizer.decode(each[:-1]) for each in ids] == ["alpha", "beta", "gamma"]
    assert all(each[-1] == 0 for each in ids)
    for path in (folder / "c.bin", folder / "none", folder / ".hidden" / "x"):
        with pytest.raises(OptionError):
            texts.read([path], found)


def write(folder: Path, **files: str) -> list[Path]:
    for name, content in files.items():
        (folder / f"{name}.txt").write_text(content, encoding="utf-8")
    return [folder / f"{name}.txt" for name in files]


def test_each_text_ends_once(target: Path, tmp_path: Path) -> None:
    """One that says itself that it ends is not ended again; one of white space is none."""
    found = checkpoints.find(str(target))
    paths = write(tmp_path, plain="alpha", ended="alpha<|endoftext|>", blank=" \n", again="beta")
    plain, ended, again = texts.read(paths, found)
    assert plain == ended
    assert plain.count(0) == again.count(0) == 1
    assert texts.read([], found) == []


def test_what_is_no_text_is_said_by_name(target: Path, tmp_path: Path) -> None:
    found = checkpoints.find(str(target))
    (tmp_path / "bytes.bin").write_bytes(b"ab\xff")
    (tmp_path / "bad.jsonl").write_text('{"text": "beta"}\n{"other": 1}\n')
    (blank,) = write(tmp_path, blank=" \n")
    for path, message in (
        (tmp_path / "none", f"{tmp_path}/none does not exist: give --text a file or a folder"),
        (blank, f"{blank} has no text in it: give --text files with some, or drop it"),
        (tmp_path / "bytes.bin", f"{tmp_path}/bytes.bin is not UTF-8 (invalid start byte): give --text files of text"),
        (tmp_path / "bad.jsonl", f'{tmp_path}/bad.jsonl:2: give one of "text", "prompt", "turns" or "messages"'),
    ):
        with pytest.raises(OptionError) as caught:
            texts.read([path], found)
        assert str(caught.value) == message


def test_a_folders_bytes_are_left_out_and_that_is_said(
    target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, a="alpha", b="beta")
    (tmp_path / "c.bin").write_bytes(b"\xff")
    ids = texts.read([tmp_path], checkpoints.find(str(target)))
    assert len(ids) == 2
    assert caplog.messages == [f"1 of 3 files in {tmp_path} are not UTF-8 and left out, like c.bin"]
