"""The proof's stages on the stand-in card (tests/support/card): none fails for a typing mistake; what each leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def stage(card: dict[str, str], folder: Path, name: str, **environment: str) -> dict[str, Any]:
    """One stage at its smallest; the JSON files that it left, by name."""
    places = {"OUT": str(folder / "out"), "WORK": str(folder / "work"), "CARRIED": str(folder / "none")}
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "gpu_proof.sh"), name],
        cwd=ROOT,
        env=card | places | {"PYTHON": sys.executable, "SMOKE": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=480,  # which no stage may take anywhere
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = sorted((folder / "out").rglob("*.json"))
    return {path.relative_to(folder / "out").as_posix(): json.loads(path.read_text()) for path in found}


@pytest.mark.slow
def test_a_and_b_need_the_repository_alone(card: dict[str, str], tmp_path: Path) -> None:
    """Kernels compiled, tests and checks a process per file; then their times, by what a has compiled."""
    found = stage(card, tmp_path, "a")
    assert list(found) == ["memcheck.json", "probe.json", "racecheck.json", "tests.json"]
    assert found["probe.json"]["flavours"]["cuda.bindings"]["runs"] is True
    for name in ("tests", "memcheck", "racecheck"):
        seen = found[f"{name}.json"]
        assert seen["tool"] == {"tests": "none"}.get(name, name)
        assert seen["left"] == []
        files = {each["file"]: each for each in seen["files"]}
        assert files["tests/plugins/test_walk.py"]["passed"] > 1
        assert not any(each.get("failed") or each.get("skipped") for each in files.values())
    found = stage(card, tmp_path, "b", LD_LIBRARY_PATH="")  # torch is the host's here, and waits for no card
    for name in ("kernels.json", "no-bulk/kernels.json"):
        rows = found[name]["tree_attention"]
        assert rows
        assert all(row["error"] < 2e-2 and row["us"] > 0 and row["sdpa_us"] > 0 for row in rows)
        assert found[name]["copy_gb_s"] > 0
        assert found[name]["left"] == []
    assert found["kernels.json"]["others"]
    assert not found["no-bulk/kernels.json"]["others"]


def test_a_file_that_crashes_ends_no_other(tmp_path: Path) -> None:
    """What fails is told with its last words, and what had no time is listed."""
    code = """import sys, pathlib; sys.path.insert(0, "scripts"); import gpu_tests
folder = sys.argv[1]
gpu_tests.OPTIONS = ("-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", folder)
gpu_tests.files = lambda: sorted(map(str, pathlib.Path(folder).glob("test_*.py")))
sys.argv = ["gpu_tests.py", *sys.argv[2:]]
sys.exit(gpu_tests.main())"""
    (tmp_path / "test_crash.py").write_text("import os\ndef test_it():\n    os.abort()\n")
    (tmp_path / "test_fine.py").write_text("def test_it():\n    pass\n")
    (tmp_path / "test_long.py").write_text("import time\ndef test_it():\n    time.sleep(30)\n")
    command = [sys.executable, "-c", code, str(tmp_path), str(tmp_path / "out.json"), "--jobs", "1"]
    done = subprocess.run([*command, "--seconds", "6"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    crash, fine, long = found["files"]
    assert crash["status"] not in (0, 1)
    assert "Abort" in crash["output"]
    assert (fine["status"], fine["passed"]) == (0, 1)
    assert long["status"] == 124
    assert done.stdout.startswith("none: 1 passed in 3 files, 2 with faults, 0 left\n")
    done = subprocess.run([*command, "--seconds", "0", "--only", "fine"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, json.loads((tmp_path / "out.json").read_text())["left"]) == (
        1,
        [str(tmp_path / "test_fine.py")],
    )
