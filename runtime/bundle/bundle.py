"""The bundle on disk: `manifest.json`, and the check that every file is what was built.

`manifest.json` lists each file with its sha256, and carries a digest of itself. Hashes are computed in threads while
the models load; nothing is executed before they are done.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from specbuild.runtime.errors import BundleError

from .manifest import MANIFEST, FileRecord, Manifest, parse

_BLOCK = 1 << 20


def sha256_file(path: Path) -> str:
    """sha256 of a file, read in blocks; hashing releases the interpreter's lock."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def file_record(path: Path) -> FileRecord:
    """The record of a file as it is now."""
    return FileRecord(path.stat().st_size, sha256_file(path))


@dataclass(frozen=True, slots=True)
class Bundle:
    """A folder and its manifest."""

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Bundle:
        """Read and check the manifest, not yet the files; raises BundleError."""
        root = Path(folder)
        if not root.is_dir():
            raise BundleError(f"{root} is not a folder: give the bundle that `specbuild build -o` wrote")
        if not (root / MANIFEST).is_file():
            raise BundleError(f"{root} has no {MANIFEST}: it is not a specbuild bundle")
        return cls(root, parse(root))

    def path(self, name: str) -> Path:
        """Where a file of the manifest is."""
        return self.folder / name

    def verify(self) -> None:
        """Check every file's size and hash; raises BundleError for the first that differs."""
        with self.verifying():
            pass

    @contextmanager
    def verifying(self) -> Iterator[None]:
        """Check every file while the body runs; a changed file's BundleError takes precedence over the body's error."""
        names = sorted(self.manifest.files, key=lambda n: -self.manifest.files[n].bytes)
        with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
            checks = [pool.submit(self._check, name) for name in names]
            try:
                yield
            finally:
                for check in checks:
                    check.result()

    def _check(self, name: str) -> None:
        record, path = self.manifest.files[name], self.path(name)
        try:
            size = path.stat().st_size
            if size == record.bytes and sha256_file(path) == record.sha256:
                return
        except OSError as error:
            raise BundleError(f"{path} cannot be read ({error.strerror}): build the bundle again") from None
        raise BundleError(
            f"{path} is not what was built (its {'hash' if size == record.bytes else 'size'} differs): "
            "copy the bundle again, or build it again"
        )
