"""Reads the header of a GGUF file with a limit on every count, before any library trusts one of them.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

from specbuild.builder.strict_json import NotRegularError, opened
from specbuild.runtime.errors import CheckpointError, shown

MAGIC, VERSIONS = b"GGUF", (2, 3)
MAX_BYTES = 512 << 20  # size of the header
MAX_ENTRIES = 1 << 16  # metadata entries, and tensors
MAX_VALUES = 1 << 22  # values in all metadata arrays together
MAX_NAME, MAX_DIMS = 1 << 16, 4
ALIGNMENT = "general.alignment"
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # scalar types
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class Tensor:
    """A tensor's name, dimensions (the innermost first), type number, and offset from the start of the data."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class GgufHeader:
    """The metadata and tensors that a file's header lists.

    Attributes:
        metadata: Its metadata, with arrays replaced by their lengths.
        tensors: Its tensors.
        data: Where the tensors' data begins.
        size: The file's bytes.
        entries: From where to where each entry of the metadata goes, and behind them the list of tensors as "".
    """

    metadata: dict[str, Any]
    tensors: list[Tensor]
    data: int
    size: int
    entries: dict[str, tuple[int, int]]


def save_without_tokens(path: Path, header: GgufHeader, to: Path) -> None:
    """Write a GGUF file's header again without its lists of tokens, which are slow to read, and no data.

    The new file is as long as the data, and takes no room.
    """
    kept = [key for key in header.entries if not key.startswith("tokenizer.") or key.endswith("_id")]
    with path.open("rb") as file, to.open("wb") as out:
        out.write(file.read(len(MAGIC) + 4) + struct.pack("<QQ", len(header.tensors), len(kept) - 1))
        for start, end in (header.entries[key] for key in kept):
            file.seek(start)
            out.write(file.read(end - start))
        out.truncate(aligned(out.tell(), header.metadata.get(ALIGNMENT, 32)) + header.size - header.data)


def aligned(place: int, alignment: int) -> int:
    """Return the next multiple of `alignment`."""
    return -(-place // alignment) * alignment


def read_header(path: Path) -> GgufHeader:
    """Read a GGUF file's header.

    Raises CheckpointError if it is not a regular file, not GGUF, truncated, damaged, or beyond the limits above.
    """
    try:
        with opened(path) as file:
            return _Reader(str(path), file).header()
    except NotRegularError:
        raise CheckpointError(
            f"{path} is not a regular file: give the folder of a checkpoint, or a GGUF file"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): give another file") from None


class _Reader:
    """Reads a header from its beginning, never past the end of the file or `MAX_BYTES`."""

    def __init__(self, name: str, file: IO[bytes]) -> None:
        self.name, self.file, self.size = name, file, os.fstat(file.fileno()).st_size
        self.place, self.values = 0, 0

    def header(self) -> GgufHeader:
        if self.size < len(MAGIC) or self.take(len(MAGIC)) != MAGIC:
            raise CheckpointError(
                f"{self.name} is a file, and no GGUF: give the folder of a checkpoint, or a GGUF file"
            )
        (version,) = self.unpack("I")
        if version not in VERSIONS:
            raise CheckpointError(f"{self.name} is GGUF of version {version}, not 2 or 3: convert it again")
        tensors, entries = self.unpack("QQ")
        for count, what in ((tensors, "tensors"), (entries, "entries of metadata")):
            if count > MAX_ENTRIES:
                raise CheckpointError(f"{self.name} says it has {count} {what}: more than {MAX_ENTRIES}, do not use it")
        metadata, places = dict[str, Any](), dict[str, tuple[int, int]]()
        for _ in range(entries):
            start, key = self.place, self.text(MAX_NAME)
            metadata[key] = self.value(*self.unpack("I"))
            places[key] = start, self.place
        start, found = self.place, [self.tensor() for _ in range(tensors)]
        places[""] = start, self.place
        alignment = metadata.get(ALIGNMENT, 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise CheckpointError(f"{self.name} has {ALIGNMENT} {shown(alignment)}, no power of two: convert it again")
        return GgufHeader(metadata, found, aligned(self.place, alignment), self.size, places)

    def tensor(self) -> Tensor:
        name = self.text(MAX_NAME)
        (dims,) = self.unpack("I")
        shape = self.unpack(f"{dims}Q") if 1 <= dims <= MAX_DIMS else ()
        if not 0 < prod(shape) < 1 << 63 or not shape:
            raise CheckpointError(f"{self.name} has tensor {shown(name)} of no possible shape: download it again")
        return Tensor(name, shape, *self.unpack("IQ"))

    def value(self, kind: int) -> Any:
        """Read a scalar or a string; skip an array and return its length."""
        if kind in _FORMATS:
            return self.unpack(_FORMATS[kind])[0]
        if kind == _STRING:
            return self.text(MAX_BYTES)
        if kind != _ARRAY:
            raise CheckpointError(f"{self.name} has metadata of an unknown type {kind}: it is damaged")
        inner, count = self.unpack("IQ")
        self.values += count
        if self.values > MAX_VALUES or inner not in (*_FORMATS, _STRING):
            what = f"a list of {count} values" if inner != _ARRAY else "lists in lists"
            raise CheckpointError(f"{self.name} has {what} in its metadata: not supported")
        if inner == _STRING:
            for _ in range(count):
                self.take(*self.unpack("Q"))
        else:
            self.take(count * struct.calcsize(_FORMATS[inner]))
        return count

    def text(self, limit: int) -> str:
        (length,) = self.unpack("Q")
        if length > limit:
            raise CheckpointError(f"{self.name} has a name of {length} bytes: it is damaged, download it again")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise CheckpointError(
                f"{self.name} has a text that is no UTF-8: it is damaged, download it again"
            ) from None

    def unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{layout}", self.take(struct.calcsize(f"<{layout}")))

    def take(self, count: int) -> bytes:
        self.place += count
        if self.place > MAX_BYTES < self.size:
            raise CheckpointError(f"{self.name} has a header of more than {MAX_BYTES >> 20} MiB: do not use it")
        found = self.file.read(count) if self.place <= self.size else b""
        if len(found) < count:
            raise CheckpointError(f"{self.name} is cut off within its header: download it again")
        return found
