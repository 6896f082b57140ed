"""A bundle on disk: `manifest.json`, and the check that every file is what was built.

`manifest.json` lists each file with its sha256, and carries a digest of itself. All files are read through this module:
the bytes it returns are those that were hashed, and nothing else of a bundle is ever opened.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

from specbuild.runtime.errors import BundleError

from .manifest import MANIFEST, MANIFEST_BYTES, FileRecord, Manifest, parse

_BLOCK = 1 << 20
_MAPPED = 1 << 20  # bytes; files from this size on are mapped, smaller ones hashed at each read
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_NOFOLLOW", 0)


def sha256_file(path: Path) -> str:
    """Return the sha256 of a file, read in blocks; hashing releases the interpreter's lock."""
    with path.open("rb", buffering=0) as file:
        return _sha256(file)


def _sha256(file: FileIO) -> str:
    digest = hashlib.sha256()
    while block := file.read(_BLOCK):
        digest.update(block)
    return digest.hexdigest()


def file_record(path: Path) -> FileRecord:
    """Return the record of a file as it is now."""
    return FileRecord(path.stat().st_size, sha256_file(path))


def open_regular(path: Path) -> FileIO:
    """Open a regular file for reading, without blocking; raise BundleError for a FIFO, device, socket or folder."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a device may already do something
            raise BundleError(f"{path} is not a regular file: copy the bundle again, or build it again")
        file = FileIO(os.path.realpath(path), opener=lambda name, _: os.open(name, _FLAGS))
    except OSError as error:
        raise BundleError(f"{path} cannot be read ({error.strerror}): build the bundle again") from None
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise BundleError(f"{path} is not a regular file: copy the bundle again, or build it again")


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle on disk; its files are read with `read` and `map`, which check their hashes.

    Attributes:
        folder: The bundle's folder.
        manifest: Its manifest, already checked.
    """

    folder: Path
    manifest: Manifest
    _maps: dict[str, mmap.mmap] = field(default_factory=dict, repr=False, compare=False)  # large files, while loading

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Bundle:
        """Read and check the manifest in `folder`, but not yet the files; raise BundleError if it is not valid."""
        root = Path(folder)
        if not root.is_dir():
            raise BundleError(f"{root} is not a folder: give the bundle that `specbuild build -o` wrote")
        if not (root / MANIFEST).exists():
            raise BundleError(f"{root} has no {MANIFEST}: it is not a specbuild bundle")
        with open_regular(root / MANIFEST) as file:
            data = file.read(MANIFEST_BYTES + 1)
        if len(data) > MANIFEST_BYTES:
            raise BundleError(f"{root / MANIFEST} has more than {MANIFEST_BYTES >> 20} MiB: it is not a manifest")
        return cls(root, parse(root, data))

    def path(self, name: str) -> Path:
        """Return the path of the manifest's file `name`, for messages; read its contents with `read` or `map`."""
        return self.folder / name

    def read(self, name: str, limit: int = 1 << 31) -> bytes:
        """Return a file's bytes.

        Args:
            name: The file's path relative to the folder, as the manifest lists it.
            limit: Maximum size in bytes.

        Raises:
            BundleError: The file is not listed, exceeds `limit`, cannot be read, or is not what was built.
        """
        record = self._record(name)
        if record.bytes > limit:
            raise BundleError(f"{self.path(name)} has {record.bytes} bytes, more than {limit}: build the bundle again")
        with self._open(name) as file:
            data = file.read(record.bytes + 1)
        self._compare(name, len(data), hashlib.sha256(data).hexdigest())
        return data

    def map(self, name: str) -> mmap.mmap:
        """Return the bytes of the large file `name`, mapped and hashed; raise BundleError if it differs or is empty."""
        return self._maps.get(name) or self._map(name)

    def verify(self) -> None:
        """Check every file's kind, size and hash; raise BundleError if one differs."""
        with self.verified():
            pass

    @contextmanager
    def verified(self) -> Iterator[None]:
        """Check every file, in threads, before the body runs; in the body, `map` returns them without hashing again."""
        names = sorted(self.manifest.files, key=lambda n: -self.manifest.files[n].bytes)
        for name in names:  # check all kinds and sizes before reading any file
            self._open(name).close()
        try:
            with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
                for check in [pool.submit(self._check, name) for name in names]:
                    check.result()
            yield
        finally:
            self._maps.clear()

    def _check(self, name: str) -> None:
        """Check a file; keep the mapping of a large one, so that it is hashed only once."""
        if self._record(name).bytes >= _MAPPED:
            self._maps[name] = self._map(name)
        else:
            self.read(name)

    def _map(self, name: str) -> mmap.mmap:
        with self._open(name) as file:
            if not self._record(name).bytes:
                raise BundleError(f"{self.path(name)} is empty: build the bundle again")
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._compare(name, len(mapping), _sha256(file))
        return mapping

    def _record(self, name: str) -> FileRecord:
        if name not in self.manifest.files:
            raise BundleError(f"{self.folder / MANIFEST} uses {name!r} but does not list its hash: build it again")
        return self.manifest.files[name]

    def _open(self, name: str) -> FileIO:
        """Open a file; raise BundleError if its size is not the recorded one."""
        file = open_regular(self.path(name))
        try:
            self._compare(name, os.fstat(file.fileno()).st_size)
        except BundleError:
            file.close()
            raise
        return file

    def _compare(self, name: str, size: int, sha256: str | None = None) -> None:
        record = self._record(name)
        if size == record.bytes and sha256 in (None, record.sha256):
            return
        raise BundleError(
            f"{self.path(name)} is not what was built (its {'hash' if size == record.bytes else 'size'} differs): "
            "copy the bundle again, or build it again"
        )
