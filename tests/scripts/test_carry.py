"""What a bare machine needs comes in pieces: joined they are the whole, and one that is missing or damaged is named."""

import sys
from functools import partial

import numpy as np
import pytest

pytestmark = pytest.mark.nightly
SIZES = {"a.whl": 0, "b.whl": 900_000, "c.whl": 2_500_000}


def test_pieces_are_small_and_make_the_whole_or_are_named(tmp_path, run):
    carry = partial(run, sys.executable, "scripts/gpu/carry.py")
    contents = {name: np.random.default_rng(size).bytes(size) for name, size in SIZES.items()}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    pieces, out, bundle = tmp_path / "pieces", tmp_path / "out", tmp_path / "toy.bundle"
    bundle.mkdir()
    (bundle / "manifest.json").write_text("{}")
    assert carry("make", pieces, "--wheels", tmp_path, "--bundle", bundle, "--mib", 1).returncode == 0
    for folder in pieces.iterdir():
        assert sum(file.stat().st_size for file in folder.iterdir()) <= 1 << 20
    assert carry("join", pieces, out).returncode == 0
    assert {path.name: path.read_bytes() for path in out.glob("*.whl")} == contents
    assert (out / "toy.bundle" / "manifest.json").is_file()
    paths = sorted(pieces.rglob("c.whl.*"))
    paths[0].unlink()
    paths[-1].write_bytes(b"damaged")
    done, names = carry("join", pieces, tmp_path / "again"), [path.relative_to(pieces) for path in paths]
    assert done.returncode == 1
    assert f"c.whl: {names[0]} is missing; {names[-1]} is damaged" in done.stdout
    assert {path.name for path in (tmp_path / "again").glob("*.whl")} == {"a.whl", "b.whl"}
