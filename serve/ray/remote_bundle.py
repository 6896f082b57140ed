"""A bundle at a path, or at a URL that fsspec reads; a node that finds another bundle there refuses it."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from specbuild.runtime import Bundle
from specbuild.runtime.bundle.manifest import MANIFEST
from specbuild.runtime.errors import BundleError, OptionError, message_of

CACHE = "SPECBUILD_BUNDLES"  # environment variable: the folder for bundles of URLs
_URL = re.compile(r"[a-zA-Z][\w+.-]*:/{1,3}")
_MAX_MANIFEST = 1 << 24  # bytes


@dataclass(frozen=True, slots=True)
class Source:
    """A bundle's place, its manifest's SHA-256, and the number of sequences that it was built for."""

    place: str
    manifest: str
    slots: int


def source(place: str) -> Source:
    """Return a bundle's source, read where the application is built; raises OptionError and BundleError."""
    if _URL.match(place):  # `Path` has merged its slashes
        scheme, _, rest = place.partition(":")
        place = f"{scheme}://{rest if scheme in ('file', 'local') else rest.lstrip('/')}"
    else:
        place = str(Path(place).resolve())
    bundle = Bundle.open(local(Source(place, "", 0)))
    return Source(place, _hash(bundle.folder), bundle.manifest.max_batch_size)


def local(source: Source) -> Path:
    """Return a bundle's folder on this machine, fetched if it is at a URL. Raises OptionError and BundleError.

    A manifest that is not the one that was served first is refused; the engine that loads the bundle checks the files.
    """
    folder = _fetched(source) if _URL.match(source.place) else Path(source.place)
    if source.manifest and _hash(folder) != source.manifest:
        raise BundleError(f"{source.place} is another bundle here than where it was served: copy it, or share a folder")
    return folder


def _hash(folder: Path) -> str:
    try:
        return sha256((folder / MANIFEST).read_bytes()).hexdigest()
    except OSError as error:
        raise BundleError(f"{folder} has no manifest that can be read ({error.strerror}): give a bundle") from None


def _fetched(source: Source) -> Path:
    """Return a URL's bundle in the cache, named by its manifest's hash; it is stored completely or not at all."""
    try:
        import fsspec
    except ImportError:
        raise OptionError("bundles by URL need fsspec: pip install 'specbuild-trt[ray]'") from None
    home = Path(os.environ.get(CACHE) or Path.home() / ".cache" / "specbuild" / "bundles")
    if source.manifest and (home / source.manifest).is_dir():
        return home / source.manifest
    root = source.place.rstrip("/")
    try:
        home.mkdir(parents=True, exist_ok=True)
        with fsspec.open(f"{root}/{MANIFEST}", "rb") as file:
            content = file.read(_MAX_MANIFEST + 1)
        target = home / sha256(content).hexdigest()
        if not target.is_dir():
            _fill(fsspec, root, content, target)
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        raise BundleError(f"{root} cannot be fetched ({message_of(error)[:200]}): give a bundle's URL") from None
    return target


def _fill(fsspec: Any, root: str, content: bytes, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as made:
        folder = Path(made) / "bundle"
        for name in json.loads(content)["files"]:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"its manifest names {name[:80]!r}, which is outside of it")
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with fsspec.open(f"{root}/{name}", "rb") as file, (folder / name).open("wb") as out:
                shutil.copyfileobj(file, out, 1 << 20)
        (folder / MANIFEST).write_bytes(content)
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was faster
                raise
