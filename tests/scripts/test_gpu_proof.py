"""The GPU proof's scripts, as far as a machine without a GPU can run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device import gpus
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"a-1-py3-none-any.whl": 0, "b-2-py3-none-any.whl": 900_000, "c-3-py3-none-any.whl": 2_500_000}
Carry = Callable[..., "subprocess.CompletedProcess[str]"]


def run(*command: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*map(str, command)], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=300
    )


def carry(*arguments: Any) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, ROOT / "scripts" / "carry.py", *arguments)


@pytest.fixture
def contents(tmp_path: Path) -> dict[str, bytes]:
    """Wheels under `wheels`, and a small bundle; what they hold."""
    found = {name: np.random.default_rng(size).bytes(size) for name, size in SIZES.items()}
    for name, content in found.items():
        (tmp_path / "wheels").mkdir(exist_ok=True)
        (tmp_path / "wheels" / name).write_bytes(content)
    (tmp_path / "toy.bundle" / "target").mkdir(parents=True)
    (tmp_path / "toy.bundle" / "manifest.json").write_text("{}")
    (tmp_path / "toy.bundle" / "target" / "model.plan").write_bytes(b"plan")
    return found


@pytest.fixture
def pieces(tmp_path: Path, contents: dict[str, bytes]) -> Path:
    """They all, in folders of a MiB."""
    out = tmp_path / "pieces"
    done = carry(
        "make",
        out,
        "--wheels",
        tmp_path / "wheels",
        "--bundle",
        tmp_path / "toy.bundle",
        "--mib",
        1,
        "--python",
        "3.12",
    )
    assert done.returncode == 0, done.stderr
    return out


def test_pieces_are_small_and_make_the_whole(tmp_path: Path, pieces: Path, contents: dict[str, bytes]) -> None:
    folders = sorted(pieces.iterdir())
    assert [folder.name for folder in folders] == ["01", "02", "03", "04"]
    for folder in folders:
        assert sum(file.stat().st_size for file in folder.iterdir()) <= 1 << 20
    out = tmp_path / "out"
    for _ in range(2):
        done = carry("join", pieces, out)
        assert done.returncode == 0, done.stdout + done.stderr
    assert {name: (out / name).read_bytes() for name in contents} == contents
    assert (out / "toy.bundle" / "target" / "model.plan").read_bytes() == b"plan"
    assert sorted(path.name for path in out.iterdir()) == sorted([*contents, "toy.bundle"])


def test_what_is_missing_or_damaged_is_named_and_the_rest_joined(tmp_path: Path, pieces: Path) -> None:
    whole = json.loads((pieces / "01" / "list.json").read_text(encoding="utf-8"))
    large = next(file for file in whole["files"] if file["name"].startswith("c-3"))
    missing, damaged = large["pieces"][0]["path"], large["pieces"][-1]["path"]
    (pieces / missing).unlink()
    content = bytearray((pieces / damaged).read_bytes())
    content[-1] ^= 1
    (pieces / damaged).write_bytes(content)
    done = carry("join", pieces, tmp_path / "out")
    assert done.returncode == 1
    assert f"c-3-py3-none-any.whl: {missing} is missing; {damaged} is damaged" in done.stdout
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [*sorted(SIZES)[:2], "toy.bundle"]


def test_pieces_of_two_makes_are_not_mixed(tmp_path: Path, pieces: Path) -> None:
    listed = pieces / "02" / "list.json"
    listed.write_text(listed.read_text(encoding="utf-8").replace("toy", "boy"), encoding="utf-8")
    assert "pieces of several makes" in carry("join", pieces, tmp_path / "out").stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["join", "nowhere", "out"], "nowhere has no list.json in a folder"),
        (["make", "scripts"], "scripts is not empty"),
        (["make", "build/none", "--mib", 61], "--mib must be 1…60, not 61"),
        (["make", "build/none", "--wheels", "scripts", "--bundle", "scripts"], "scripts is no bundle"),
        (["make", "build/none", "--wheels", "scripts"], "scripts has no wheel"),
    ],
)
def test_what_carry_refuses(arguments: list[Any], message: str) -> None:
    done = carry(*arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("carry: ")
    assert message in done.stderr
    assert "\n" not in done.stderr.strip()


def test_every_dependency_is_carried_or_there() -> None:
    code = "import sys; sys.path.insert(0, 'scripts'); import carry; print(*carry.PACKAGES, *carry.THERE)"
    known = {*run(sys.executable, "-c", code).stdout.split(), "onnxruntime"}  # carried as the GPU's package
    needed = (Requirement(each) for each in requires("specbuild-trt") or ())
    assert {each.name for each in needed if not each.marker or each.marker.evaluate({"extra": ""})} <= known


def proof(tmp_path: Path, *stages: str, **environment: str) -> subprocess.CompletedProcess[str]:
    folders = {"OUT": str(tmp_path / "out"), "WORK": str(tmp_path / "work"), "CARRIED": str(tmp_path / "pieces")}
    return run(
        "bash", ROOT / "scripts" / "gpu_proof.sh", *stages, **{"PYTHON": sys.executable, **folders} | environment
    )


def test_stages_are_named(tmp_path: Path) -> None:
    done = proof(tmp_path, "a", "everything")
    assert done.returncode == 2
    assert done.stderr.strip() == "unknown stage everything: use a, b, c, d"
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(gpus() > 0, reason="needs a machine without a GPU")
def test_without_a_card_every_stage_says_what_it_lacks(tmp_path: Path) -> None:
    """And one that fails stops none."""
    done = proof(tmp_path, "c", "d")
    assert done.returncode == 1
    assert f"there is no bundle ort-* in {tmp_path}/work/joined" in done.stdout
    assert "stage c failed" in done.stdout
    assert "stage d failed" in done.stdout
    assert "libcuda.so.1" in json.loads((tmp_path / "out" / "rtx.json").read_text(encoding="utf-8"))["reason"]


def test_the_probe_says_what_it_saw(tmp_path: Path) -> None:
    done = run(sys.executable, ROOT / "scripts" / "flavours.py", tmp_path / "probe.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "probe.json").read_text(encoding="utf-8"))["flavours"]
    names = ["tensorrt", "tensorrt_rtx", "tensorrt_lean", "onnxruntime_cuda", "cuda.core", "cuda.bindings"]
    assert list(found) == names
    for name, seen in found.items():
        assert ("reason" in seen) == ("fails" in seen) == (seen.get("runs") is not True)
        assert gpus() or "fails" in seen, name
    for name in ("tensorrt_rtx", "cuda.core", "cuda.bindings"):  # installed here, and each builds without a GPU
        assert "bytes" in found[name]["builds"]
        assert gpus() or (found[name]["fails"] == "runs" and "libcuda.so.1" in found[name]["reason"])


@pytest.mark.parametrize(
    ("code", "fails", "reason"),
    [
        ('print(\'{"imports": "1"}\', flush=True); import os; os.abort()', "builds", "ended with status -6"),
        ('print(\'{"imports": "1"}\', flush=True); import time; time.sleep(60)', "builds", "took more than 2 s"),
        ("import sys; sys.exit('no such thing')", "imports", "ended with status 1"),
    ],
)
def test_a_flavour_that_ends_its_process_is_reported(code: str, fails: str, reason: str) -> None:
    script = f"import json, sys; sys.path.insert(0, 'scripts'); import flavours; code = {code!r}\n"
    done = run(sys.executable, "-c", script + "print(json.dumps(flavours.probe([sys.executable, '-c', code], 2)))")
    seen = json.loads(done.stdout)
    assert seen["fails"] == fails
    assert reason in seen["reason"]
    assert seen.get("stderr") == ("no such thing" if fails == "imports" else None)
    assert ("imports" in seen) == (fails != "imports")


@pytest.mark.slow
def test_engines_smoke(bundle: Path, tmp_path: Path) -> None:
    """The end-to-end benchmark on a CPU bundle; its own tokens are what is expected."""
    done = run(sys.executable, "benchmarks/gpu/engines.py", bundle, "--cpu-bundle", bundle, "--out", tmp_path, "--smoke")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "engines-pycode.json").read_text(encoding="utf-8"))
    exactness = result["exactness"]
    assert exactness["exact"] == {"the CPU's": True, "its own": True}
    for cases in exactness["against"].values():
        assert len(cases) == 8
        assert all(case["tokens"] == 16 and not case["divergences"] for case in cases)
        assert any(case["mean_acceptance_length"] > 1 for case in cases)
    assert list(result["speed"]) == ["batch 1", "batch 2"]
    assert list(result["speed"]["batch 1"]["ways"]) == ["off", "topk:2,3", "off, sampled", "default"]
    assert result["speed"]["batch 1"]["ttft_ms of 512 tokens"] > 0
    assert result["speed"]["batch 1"]["ways"]["off"]["tokens_per_round"] == 1


def test_engines_say_what_does_not_load(tmp_path: Path) -> None:
    done = run(sys.executable, "benchmarks/gpu/engines.py", tmp_path / "none.bundle", "--out", tmp_path, "--smoke")
    assert done.returncode == 1
    assert "none.bundle" in json.loads((tmp_path / "engines-none.json").read_text(encoding="utf-8"))["failed"]


def test_engines_leave_what_they_measured_before_they_were_stopped(bundle: Path, tmp_path: Path) -> None:
    code = """import sys
sys.path.insert(0, "benchmarks")
import engines

def stopped(*_): raise KeyboardInterrupt
engines.first_token = stopped  # the first of the times
engines.main()"""
    done = run(sys.executable, "-c", code, bundle, "--out", tmp_path, "--smoke")
    assert done.returncode != 0
    assert "KeyboardInterrupt" in done.stderr
    result = json.loads((tmp_path / "engines-pycode.json").read_text(encoding="utf-8"))
    assert len(result["load_s"]) == 2
    assert len(result["exactness"]["against"]["its own"]) == 8
    assert [path.name for path in tmp_path.iterdir()] == ["engines-pycode.json"]
