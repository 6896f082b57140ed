"""What is for GPUs, run here: its tests in a process that finds the stand-in card (tests/support/card)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fake_card import run

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.nightly  # the stand-in takes half a minute to compile
def test_the_stand_in_is_as_strict_as_a_driver(card, tmp_path):
    run(card, tmp_path, "support/card/checks.py")


@pytest.mark.nightly
def test_what_the_driver_refuses_leaves_nothing_behind(card, tmp_path):
    run(card, tmp_path, "support/card/refusals.py")


@pytest.mark.slow
@pytest.mark.nightly(only=("gpu",))
@pytest.mark.parametrize("what", ["gpu", "kernels", "tensorrt"])
def test_the_device(card, tmp_path, what):
    run(card, tmp_path, "-mgpu", f"runtime/backends/{what}")


@pytest.mark.nightly
def test_single_kernels(card, tmp_path):
    run(card, tmp_path, "-mgpu", "-knot anything", "plugins/test_walk.py", "plugins/test_publish.py")


@pytest.mark.soak  # the same kernels on the same host as everywhere, by way of a driver
def test_all_that_is_for_a_gpu(card, tmp_path):
    run(card, tmp_path, "-mgpu", "runtime", "plugins", "--ignore=tests/plugins/test_generation.py")


@pytest.mark.nightly
def test_flavours_on_the_stand_in(card, tmp_path):
    """NVRTC's code is loaded and launched by cuda.core and by the driver's bindings."""
    out = tmp_path / "probe.json"
    subprocess.run(
        [sys.executable, ROOT / "scripts" / "gpu" / "flavours.py", out], env=card, check=True, capture_output=True
    )
    found = json.loads(out.read_text())
    assert found["gpu"].startswith("stand-in card, 9.0, ")
    assert [found["flavours"][name].get("runs") for name in ("cuda.core", "cuda.bindings")] == [True, True]
