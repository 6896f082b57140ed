"""The kernels' benchmark runs, on the host's kernels; what it measures there means nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly


def test_smoke(host, tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu.kernels", "--smoke", "--library", host.path, "--out", tmp_path]
    subprocess.run([*map(str, command)], cwd=Path(__file__).resolve().parents[2], check=True)
    result = json.loads((tmp_path / "kernels.json").read_text(encoding="utf-8"))
    rows = result["tree_attention"]
    assert all(row["error"] < 4e-3 and row["us"] > 0 and row["sdpa_us"] > 0 for row in rows)
    assert [row.get("capacity") for row in rows] == [None, None, 900]
    assert {"choose sampled", "walk", "commit", "verify"} <= result["others"].keys()
