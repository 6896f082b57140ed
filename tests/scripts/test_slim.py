"""A library's GPU code for other architectures becomes zeros, and everything else stays where and what it was."""

import struct
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly
NAMES = b"\0.nv_fatbin\0.shstrtab\0"


@pytest.fixture(scope="module")
def slim(import_script):
    return import_script("gpu/slim")


def entry(kind, architecture, code):
    head = struct.pack("<HHIQ", kind, 0x101, 64, len(code)) + bytes(12) + struct.pack("<I", architecture)
    return head + bytes(64 - len(head)) + code


@pytest.fixture(scope="module")
def library(slim):
    """A 64-bit ELF file of two sections: the GPU's code, and the sections' names."""
    entries = entry(2, 80, b"eighty" * 4) + entry(2, 90, b"ninety" * 4) + entry(1, 90, b"ptx90...")
    code = struct.pack("<IHHQ", slim.CONTAINER, 1, 16, len(entries)) + entries
    names = 64 + len(code)
    elf = struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, names + len(NAMES), 0, 64, 0, 0, 64, 2, 1)
    sections = struct.pack("<IIQQQQ", 1, 1, 0, 0, 64, len(code)) + bytes(24)
    sections += struct.pack("<IIQQQQ", 12, 3, 0, 0, names, len(NAMES)) + bytes(24)
    return b"\x7fELF\x02\x01\x01" + bytes(9) + elf + code + NAMES + sections


def test_code_of_one_architecture_stays(slim, library):
    after, expected = bytearray(library), library
    assert slim.slim(after, 90)
    for gone in (b"eighty" * 4, b"ptx90..."):
        expected = expected.replace(gone, bytes(len(gone)))
    assert bytes(after) == expected
    assert not slim.slim(bytearray(library), 89)


def test_a_wheel_becomes_an_archive_without_what_is_never_loaded(slim, library, tmp_path):
    wheel, out = tmp_path / "onnxruntime_gpu-1-py3-none-any.whl", tmp_path / "out.tar.xz"
    with zipfile.ZipFile(wheel, "w") as file:
        for name in ("__init__.py", "capi/libonnxruntime_providers_cuda.so", "capi/libonnxruntime.so.1.31.1"):
            file.writestr(f"onnxruntime/{name}", library)
    slim.pack(wheel, out, 90)
    with tarfile.open(out) as tar:
        files = {Path(member.name).name for member in tar if member.isfile()}
    assert files == {"__init__.py", "libonnxruntime_providers_cuda.so"}
    with pytest.raises(SystemExit, match="has no code for sm_75"):
        slim.pack(wheel, out, 75)
