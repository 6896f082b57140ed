"""The kernels' benchmark runs, on the host's kernels; what it measures there means nothing."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from device import GPU

from specbuild.runtime.backends.kernels.abi import Attention, KernelLibrary

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "kernels.py"


@pytest.mark.slow
def test_smoke(host: KernelLibrary, tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, "--smoke", "--library", host.path, "--out", tmp_path]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "kernels.json").read_text(encoding="utf-8"))
    assert all(row["error"] < 4e-3 and row["us"] > 0 and row["sdpa_us"] > 0 for row in result["tree_attention"])
    assert {"choose sampled", "walk", "commit", "verify"} <= result["others"].keys()
    assert [row["capacity"] for row in result["tree_attention"]] == [0, 0, 900]
    assert result["tree_attention"][2]["splits"] > 2  # of 63 rows, which are one tile


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_without_a_library_it_compiles_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For this machine's CPU, from the folders that the tests compile it from."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    library = importlib.import_module("gpu").load(None, True, tmp_path)
    assert library.path == tmp_path / "libspecbuild_host.so"
    assert library.splits(Attention(), 4) == 1


@pytest.mark.slow
@pytest.mark.skipif(bool(GPU), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--out", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "no GPU that torch can use" in done.stderr
