"""Every set of instructions gives the bits of plain C++: this machine's, and ARM's in emulation."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ARM = ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++")
EMULATED = ("qemu-aarch64", "-cpu", "max", "-L", "/usr/aarch64-linux-gnu")


@pytest.mark.slow
@pytest.mark.parametrize("arm", [False, True], ids=["this machine", "aarch64"])
def test_all_sets_give_the_same_bits(tmp_path, arm):
    if arm and not (shutil.which("aarch64-linux-gnu-g++") and shutil.which(EMULATED[0])):
        pytest.skip("no compiler and emulator for aarch64")
    if not shutil.which("cmake"):
        pytest.skip("cmake is not installed")
    make = ["cmake", "-S", ROOT, "-B", tmp_path, "-DCMAKE_BUILD_TYPE=Release", "-DSPECBUILD_CPU_CHECK=ON"]
    subprocess.run([*make, *(ARM if arm else ())], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", tmp_path, "--target", "specbuild_cpu_check"], check=True, capture_output=True)
    program = [*(EMULATED if arm else ()), tmp_path / "plugins" / "cpu" / "specbuild_cpu_check"]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert ("neon-dotprod" in done.stdout.split()) is arm
    assert done.stdout.split()[-1] == "portable"
