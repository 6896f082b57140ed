"""What a launch asks of CUDA: again after a failure, and by several threads at once."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

PLUGINS, HARNESS = Path(__file__).resolve().parents[2] / "plugins", Path(__file__).parent / "launch"
NAMES = "asked", "allowed", "launched", "overlapped", "allowance"
FIRST = 0  # a kernel


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler, path = shutil.which("g++") or pytest.skip("needs g++"), tmp_path_factory.mktemp("launch") / "harness.so"
    flags = ["-std=c++17", "-shared", "-fPIC", "-fno-gnu-unique", "-pthread", f"-I{HARNESS}", f"-I{PLUGINS}"]
    subprocess.run([compiler, *flags, str(HARNESS / "harness.cpp"), "-o", str(path)], check=True)
    return path


@pytest.fixture
def harness(library, tmp_path):
    """The host's side of a launch, as if it were new: a copy's memory, in which nothing is known of any kernel."""
    found = ctypes.CDLL(str(shutil.copy(library, tmp_path)))
    found.harness_error.restype = ctypes.c_char_p
    return found


def counts(harness):
    numbers = (ctypes.c_int * len(NAMES))()
    harness.harness_counts(numbers)
    return dict(zip(NAMES, numbers, strict=True))


def test_what_failed_is_asked_again(harness):
    harness.harness_fail(1)
    assert harness.harness_launch(FIRST, 0, 0, 0) == 2
    assert harness.harness_error() == b"CUDA: invalid argument"
    assert harness.harness_compiled_for(FIRST, 0) == -1
    assert counts(harness)["launched"] == 0
    harness.harness_fail(0)
    assert harness.harness_launch(FIRST, 0, 0, 0) == 0
    harness.harness_fail(1)
    assert harness.harness_launch(FIRST, 0, 70_000, 0) == 2
    assert harness.harness_launch(FIRST, 0, 0, 0) == 0  # needs no further bytes
    harness.harness_fail(0)
    assert harness.harness_launch(FIRST, 0, 70_000, 0) == 0
    assert counts(harness) == {"asked": 3, "allowed": 2, "launched": 3, "overlapped": 0, "allowance": 70_000}


def test_threads_ask_together_and_no_allowance_shrinks(harness):
    harness.harness_launch_at_once(8, 40_000)
    found = counts(harness)
    assert found["asked"] == 1
    assert found["allowance"] == 40_000
    assert found["launched"] == 40_000
