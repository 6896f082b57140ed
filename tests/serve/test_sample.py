"""Samples of live texts: lines that `specbuild distill` reads, in files that stay small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ended
import pytest

from specbuild.builder.quantize.texts import lines
from specbuild.runtime.errors import OutputError
from specbuild.serve.sample import Sample

ENGINE: Any = ended.Engine()


def test_its_lines_are_texts_for_distill(tmp_path: Path) -> None:
    sample = Sample(tmp_path / "live.jsonl")
    sample.add(ENGINE, "m", [1, 2], [3])
    sample.add(ENGINE, "m", [4], [5])
    assert list(lines(sample.path, None)) == ["1 2 3", "4 5"]
    assert json.loads(sample.path.read_text().splitlines()[0])["token_ids"] == [1, 2, 3]
    assert sample.path.stat().st_mode & 0o077 == 0


def test_a_full_file_is_set_aside_and_the_one_before_it_goes(tmp_path: Path) -> None:
    sample = Sample(tmp_path / "live.jsonl", limit=150)
    for token in range(10):
        sample.add(ENGINE, "m", [token], [])
    assert {path.name for path in tmp_path.iterdir()} == {"live.jsonl", "live-before.jsonl"}
    assert all(path.stat().st_size <= 150 for path in tmp_path.iterdir())
    assert list(lines(sample.path, None))[-1] == "9"


def test_a_place_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="another place"):
        Sample(tmp_path / "no" / "live.jsonl").add(ENGINE, "m", [1], [2])
