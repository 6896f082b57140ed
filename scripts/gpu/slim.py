"""Pack a wheel with the GPU code of one architecture only, so that it takes a quarter of the transfers.

python scripts/gpu/slim.py WHEEL OUT.tar.xz --arch 90

Every library keeps its size and its list of code (its "fat binary"). The code of other architectures becomes zeros,
which compress to almost nothing; the driver reads the list and takes the entry for its GPU. Libraries that ONNX
Runtime's Python does not load are left out. The archive has the wheel's files under `site/`. Use it only on a machine
of that architecture, from a folder; it is never installed.
"""

from __future__ import annotations

import argparse
import struct
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

CONTAINER = 0xBA55ED50  # begins each container of entries in .nv_fatbin
ELF = 2  # kind of an entry with machine code; 1 is PTX
UNUSED = ("libonnxruntime.so", "libonnxruntime_providers_tensorrt")


def section(library: bytearray, name: bytes) -> tuple[int, int] | None:
    """Return the offset and size of a section in a 64-bit ELF file; None if it has no such section."""
    if library[:5] != b"\x7fELF\x02":
        return None
    table, size, count, names = (*struct.unpack_from("<Q", library, 40), *struct.unpack_from("<HHH", library, 58))
    headers = [struct.unpack_from("<IIQQQQ", library, table + i * size) for i in range(count)]
    for header in headers:
        at = headers[names][4] + header[0]
        if library[at : library.index(0, at)] == name:
            return header[4], header[5]
    return None


def entries(library: bytearray, begin: int, size: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield each entry's kind, architecture (such as 90), code offset and code size."""
    at, end = begin, begin + size
    while at + 16 <= end:
        magic, _, header, length = struct.unpack_from("<IHHQ", library, at)
        if magic != CONTAINER:
            at += 8  # padding between containers
            continue
        entry, at = at + header, at + header + length
        while entry < at:
            kind, _, head, code = struct.unpack_from("<HHIQ", library, entry)
            (architecture,) = struct.unpack_from("<I", library, entry + 28)
            yield kind, architecture, entry + head, code
            entry += head + code


def slim(library: bytearray, architecture: int) -> bool:
    """Zero the code of other architectures; return whether there was code of this one, or no GPU code at all."""
    found = section(library, b".nv_fatbin")
    if found is None:
        return True
    kept = False
    for kind, built, at, size in list(entries(library, *found)):
        if kind == ELF and built == architecture:
            kept = True
        else:
            library[at : at + size] = bytes(size)
    return kept


def pack(wheel: Path, out: Path, architecture: int) -> None:
    """Write the archive; raise SystemExit if a library has no code for the architecture."""
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(wheel) as files, tarfile.open(out, "w:xz") as tar:
        for name in files.namelist():
            if name.endswith("/") or Path(name).name.startswith(UNUSED):
                continue
            content = bytearray(files.read(name))
            if ".so" in Path(name).name and not slim(content, architecture):
                raise SystemExit(f"slim: {name} has no code for sm_{architecture}")
            file = Path(scratch) / "file"
            file.write_bytes(content)
            tar.add(file, f"site/{name}")


def main() -> int:
    """Pack the wheel that the command line names; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--arch", type=int, default=90)
    given = parser.parse_args()
    pack(given.wheel, given.out, given.arch)
    print(f"{given.out}: {given.out.stat().st_size / 2**20:.1f} MiB of {given.wheel.stat().st_size / 2**20:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
