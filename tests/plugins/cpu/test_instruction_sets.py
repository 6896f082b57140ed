"""ARM's instructions give the bits of plain C++, in emulation; the other tests here hold this machine's sets."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ARM = ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++")
EMULATED = ("qemu-aarch64", "-cpu", "max", "-L", "/usr/aarch64-linux-gnu")


@pytest.mark.slow
def test_all_sets_give_the_same_bits(tmp_path):
    if not (shutil.which("aarch64-linux-gnu-g++") and shutil.which(EMULATED[0])):
        pytest.skip("no compiler and emulator for aarch64")
    if not shutil.which("cmake"):
        pytest.skip("cmake is not installed")
    make = ["cmake", "-S", ROOT, "-B", tmp_path, "-DCMAKE_BUILD_TYPE=Release", "-DSPECBUILD_CPU_CHECK=ON", *ARM]
    subprocess.run(make, check=True, capture_output=True)
    subprocess.run(["cmake", "--build", tmp_path, "--target", "specbuild_cpu_check"], check=True, capture_output=True)
    done = subprocess.run(
        [*EMULATED, tmp_path / "plugins" / "cpu" / "specbuild_cpu_check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert "neon-dotprod" in done.stdout.split()
    assert done.stdout.split()[-1] == "portable"
