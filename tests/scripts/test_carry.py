"""What a bare machine needs comes in pieces: joined they are the whole, and one that is missing or damaged is named."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.slow
SIZES = {"a-1-py3-none-any.whl": 0, "b-2-py3-none-any.whl": 900_000, "c-3-py3-none-any.whl": 2_500_000}


@pytest.fixture
def carry(run: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: run(sys.executable, "scripts/gpu/carry.py", *arguments)


def test_pieces_are_small_and_make_the_whole_or_are_named(tmp_path: Path, carry: Any) -> None:
    contents = {name: np.random.default_rng(size).bytes(size) for name, size in SIZES.items()}
    bundle, wheels, pieces, out = (tmp_path / name for name in ("toy.bundle", "wheels", "pieces", "out"))
    for folder in (bundle, wheels):
        folder.mkdir()
    for name, content in contents.items():
        (wheels / name).write_bytes(content)
    (bundle / "manifest.json").write_text("{}")
    assert carry("make", pieces, "--wheels", wheels, "--bundle", bundle, "--mib", 1).returncode == 0
    for folder in pieces.iterdir():
        assert sum(file.stat().st_size for file in folder.iterdir()) <= 1 << 20
    assert carry("join", pieces, out).returncode == 0
    assert {name: (out / name).read_bytes() for name in contents} == contents
    assert (out / "toy.bundle" / "manifest.json").read_text() == "{}"
    files = json.loads((pieces / "01" / "list.json").read_text())["files"]
    paths = [piece["path"] for file in files if file["name"].startswith("c-3") for piece in file["pieces"]]
    (pieces / paths[0]).unlink()
    (pieces / paths[-1]).write_bytes(b"damaged")
    done = carry("join", pieces, tmp_path / "again")
    assert done.returncode == 1
    assert f"c-3-py3-none-any.whl: {paths[0]} is missing; {paths[-1]} is damaged" in done.stdout
    assert {path.name for path in (tmp_path / "again").iterdir()} == {*list(SIZES)[:2], "toy.bundle"}
    (pieces / "02" / "list.json").write_text("{}")
    assert "pieces of several makes" in carry("join", pieces, out).stderr


def test_what_cannot_be_is_said_in_a_line(carry: Any) -> None:
    for wrong in (["join", "nowhere", "out"], ["make", "scripts"], ["make", "build/x", "--mib", "61"]):
        done = carry(*wrong)
        assert (done.returncode, done.stderr[:7], done.stderr.count("\n")) == (1, "carry: ", 1)
