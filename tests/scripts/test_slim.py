"""A library's GPU code for other architectures becomes zeros, and everything else stays where and what it was."""

from __future__ import annotations

import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import slim  # noqa: E402

NAMES = b"\0.nv_fatbin\0.shstrtab\0"


def entry(kind: int, architecture: int, code: bytes) -> bytes:
    head = struct.pack("<HHIQ", kind, 0x101, 64, len(code)) + bytes(12) + struct.pack("<I", architecture)
    return head + bytes(64 - len(head)) + code


def container(*found: bytes) -> bytes:
    whole = b"".join(found)
    return struct.pack("<IHHQ", slim.CONTAINER, 1, 16, len(whole)) + whole


def library(code: bytes) -> bytes:
    """A 64-bit ELF file of two sections: the GPU's code, and the sections' names."""
    begin, names = 64, 64 + len(code)
    table = names + len(NAMES)
    header = (
        b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, table, 0, 64, 0, 0, 64, 2, 1)
    )
    sections = struct.pack("<IIQQQQ", 1, 1, 0, 0, begin, len(code)) + bytes(24)
    sections += struct.pack("<IIQQQQ", 12, 3, 0, 0, names, len(NAMES)) + bytes(24)
    return header + code + NAMES + sections


CODE = container(entry(2, 80, b"eighty" * 4), entry(2, 90, b"ninety" * 4)) + bytes(8)
CODE += container(entry(1, 90, b"ptx90..."), entry(2, 120, b"onetwenty" * 8), entry(2, 90, b"more90.." * 3))


def test_code_of_one_architecture_stays() -> None:
    before = library(CODE)
    after = bytearray(before)
    assert slim.slim(after, 90)
    expected = before
    for gone in (b"eighty" * 4, b"ptx90...", b"onetwenty" * 8):
        expected = expected.replace(gone, bytes(len(gone)))
    assert bytes(after) == expected
    assert [each[:2] for each in slim.entries(after, 64, len(CODE))] == [(2, 80), (2, 90), (1, 90), (2, 120), (2, 90)]
    assert not slim.slim(bytearray(before), 89)


@pytest.mark.parametrize("content", [b"print()\n", library(b"").replace(b".nv_fatbin", b".nothing..")])
def test_what_has_no_gpu_code_stays_as_it_is(content: bytes) -> None:
    after = bytearray(content)
    assert slim.slim(after, 90)
    assert bytes(after) == content


def test_a_wheel_becomes_an_archive_that_a_carry_brings(tmp_path: Path) -> None:
    """What is never loaded stays behind; the archive goes in the wheel's place, and `join` unpacks it."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "onnxruntime_gpu-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("onnxruntime/__init__.py", "x = 1\n")
        wheel.writestr("onnxruntime/capi/libonnxruntime_providers_cuda.so", library(CODE))
        wheel.writestr("onnxruntime/capi/libonnxruntime.so.1.31.1", library(CODE))
    script = [sys.executable, str(ROOT / "scripts" / "carry.py")]
    made = [*script, "make", tmp_path / "out", "--wheels", wheels, "--slim", "90"]
    subprocess.run([*map(str, made)], check=True, capture_output=True)
    subprocess.run([*script, "join", str(tmp_path / "out"), str(tmp_path / "joined")], check=True, capture_output=True)
    site = tmp_path / "joined" / "site" / "onnxruntime"
    assert (site / "__init__.py").read_text() == "x = 1\n"
    assert b"ninety" in (site / "capi" / "libonnxruntime_providers_cuda.so").read_bytes()
    assert b"eighty" not in (site / "capi" / "libonnxruntime_providers_cuda.so").read_bytes()
    assert not (site / "capi" / "libonnxruntime.so.1.31.1").exists()
    none = [*script, "make", tmp_path / "none", "--wheels", wheels, "--slim", "75"]
    done = subprocess.run([*map(str, none)], capture_output=True, text=True)
    assert done.stderr == "slim: onnxruntime/capi/libonnxruntime_providers_cuda.so has no code for sm_75\n"
    assert done.returncode == 1
    assert not (tmp_path / "none").exists()


def test_an_archive_is_a_plain_one(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr("a/b.py", "y = 2\n")
    slim.pack(tmp_path / "a.whl", tmp_path / "a.tar.xz", 90)
    with tarfile.open(tmp_path / "a.tar.xz") as tar:
        assert tar.getnames() == ["site/a/b.py"]
