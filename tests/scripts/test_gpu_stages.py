"""The proof's stages on the stand-in card (tests/support/card): none fails for a typing mistake; what each leaves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
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


@pytest.mark.soak
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


@pytest.mark.soak(only=("c-ort-cuda-fp32-onnxruntime-cuda", "d-rtx-fp16-tensorrt-rtx"))
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "bundle_name", "backend"),
    [
        ("c", "ort-cuda-fp32", "onnxruntime-cuda"),
        ("d", "rtx-fp16", "tensorrt-rtx"),  # no card that is lent runs it
    ],
)
def test_c_and_d_hold_a_bundle_against_the_cpu(
    card: dict[str, str],
    card_bundle: Callable[[str], Path],
    bundle: Path,
    tmp_path: Path,
    name: str,
    bundle_name: str,
    backend: str,
) -> None:
    """Exactness first, then each way's times; what d holds it has built, and steps that a graph may hold are in one."""
    shutil.copytree(bundle, tmp_path / "bundles" / "cpu-fp32.bundle")
    if name == "c":
        shutil.copytree(card_bundle(backend), tmp_path / "bundles" / f"{bundle_name}.bundle")
    command = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), card["PATH"]])}  # specbuild's, as installed
    found = stage(card, tmp_path, name, BUNDLES_AT=str(tmp_path / "bundles"), **command)
    wanted = {"c": [f"engines-{bundle_name}-cudnn.json", f"engines-{bundle_name}.json"]}
    assert list(found) == wanted.get(name, [f"engines-{bundle_name}.json", "rtx.json"])
    result = found[f"engines-{bundle_name}.json"]
    assert "failed" not in result
    assert result["exactness"]["exact"] == {"the CPU's": True, "its own": True}
    assert len(result["load_s"]) == 2
    assert list(result["speed"]) == ["batch 1", "batch 2"]
    first = result["speed"]["batch 1"]
    assert {"off", "topk:2,3", "topk:2,3, enqueue", "topk:2,3, resident", "default"} <= first["ways"].keys()
    assert first["ways"]["topk:2,3"]["graph_speedup"] > 0
    assert {"target 1", "target 8", "draft 2"} <= first["steps_ms"].keys()
    assert first["uncaptured"] == []
    assert result["machine"][next(key for key in result["machine"] if "clocks" in key)].startswith("stand-in card")
    if name == "d":
        assert found["rtx.json"]["listed"] is True
        assert (tmp_path / "bundles" / f"{bundle_name}.bundle.rtx-cache").is_dir()


@pytest.mark.slow
def test_a_card_that_is_not_listed_is_all_there_is_to_say(card: dict[str, str], tmp_path: Path) -> None:
    found = stage(card, tmp_path, "d", CARD_RTX_LISTS="75,80,86,89,120,121")
    assert list(found) == ["rtx.json"]
    assert found["rtx.json"]["listed"] is False


@pytest.mark.soak
@pytest.mark.slow
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
    (tmp_path / "test_long.py").write_text("import time\ndef test_it():\n    time.sleep(120)\n")
    command = [sys.executable, "-c", code, str(tmp_path), str(tmp_path / "out.json"), "--jobs", "1"]
    done = subprocess.run([*command, "--seconds", "20"], cwd=ROOT, capture_output=True, text=True)
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
