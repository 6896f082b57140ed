"""Keep what TensorRT-RTX compiles for the GPU when an engine is loaded, in a file beside the bundle.

The file holds code, and no manifest can list its hash, because it is made where it is used. So it is read only if no
other user can write it. TensorRT-RTX itself refuses a file made by another version, GPU or driver.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from specbuild.runtime.bundle.atomic_output import write
from specbuild.runtime.errors import OutputError

_log = logging.getLogger("specbuild")
_OTHERS = 0o022  # mode bits: writable by the group or by others


def cache_path(bundle: Path, name: str, digest: str, capability: str) -> Path:
    """Return the file of one engine: by model name, its plan's sha256, and the GPU's compute capability."""
    return bundle.with_name(f"{bundle.name}.rtx-cache") / f"{name}-sm{capability}-{digest[:16]}"


class RuntimeCache:
    """The kernels compiled for one engine; call `attach` before its first context and `save` after its last."""

    def __init__(self, path: Path) -> None:
        self._path, self._saved = path, b""
        self._cache: Any = None

    def attach(self, config: Any) -> None:
        """Let contexts of this configuration take their kernels from the file, and collect those that they compile."""
        self._cache, self._saved = config.create_runtime_cache(), self._read()
        if self._saved and not self._cache.deserialize(self._saved):  # made by another version, GPU or driver
            self._saved = b""
        config.set_runtime_cache(self._cache)

    def _read(self) -> bytes:
        try:
            for place in (self._path.parent, self._path):
                status = place.stat()
                if status.st_uid != os.geteuid() or status.st_mode & _OTHERS:
                    _log.warning("%s is not this user's alone: compiling anew, chmod go-w or remove it", place)
                    return b""
            return self._path.read_bytes()
        except OSError:
            return b""

    def save(self) -> None:
        """Write the file if anything was compiled; log a warning if it cannot be written."""
        if self._cache is None or (compiled := bytes(self._cache.serialize())) == self._saved:
            return
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            write(self._path, compiled, 0o600)
        except (OSError, OutputError) as error:
            _log.warning("%s cannot be written (%s): every load compiles anew", self._path, error.__cause__ or error)
