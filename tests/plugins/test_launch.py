"""What a launch asks of CUDA, counted: attributes once a kernel and device."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

PLUGINS, HARNESS = Path(__file__).resolve().parents[2] / "plugins", Path(__file__).parent / "launch"
NAMES = "asked", "allowed", "launched", "overlapped", "allowance"
FIRST, SECOND = 0, 1  # kernels
FREE = 16 * 1024  # bytes of shared memory that need no asking


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


@pytest.mark.slow
def test_a_kernel_is_asked_for_once_on_each_device(harness):
    for turn in range(3):
        for device in (0, 1):
            for kernel in (FIRST, SECOND):
                assert harness.harness_compiled_for(kernel, device) == (90, 80)[device]
                assert harness.harness_launch(kernel, device, FREE, 0) == 0
        assert counts(harness) == {
            "asked": 4, "allowed": 0, "launched": 4 * (turn + 1), "overlapped": 0, "allowance": 0
        }  # fmt: skip


@pytest.mark.slow
def test_shared_memory_is_asked_for_where_it_grows(harness):
    for shared, allowed in ((FREE + 1, 1), (FREE + 1, 1), (FREE, 1), (70_000, 2), (FREE + 1, 2), (70_000, 2)):
        assert harness.harness_launch(FIRST, 0, shared, 0) == 0
        assert counts(harness)["allowed"] == allowed
    assert counts(harness)["allowance"] == 70_000
    harness.harness_launch(FIRST, 1, FREE + 1, 0)  # on the other device nothing was allowed yet, nor the other kernel
    harness.harness_launch(SECOND, 0, FREE + 1, 0)
    assert counts(harness)["allowed"] == 4
    assert counts(harness)["asked"] == 3


def test_what_overlaps_was_compiled_for_it(harness):
    for device, overlapped in ((0, 1), (1, 1), (0, 2)):
        harness.harness_launch(FIRST, device, 0, 1)
        assert counts(harness)["overlapped"] == overlapped
    harness.harness_launch(FIRST, 0, 0, 0)
    assert counts(harness)["overlapped"] == 2


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
