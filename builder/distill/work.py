"""The folder of an unfinished training: its options, and every intermediate result that is expensive to repeat."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file
from safetensors.torch import save_file
from torch import Tensor

from specbuild.builder.strict_json import decode, read_text
from specbuild.runtime.bundle.atomic_output import write
from specbuild.runtime.errors import OptionError, OutputError, one_line

from .options import flag

Arrays = dict[str, NDArray[Any]]
IDENTITY, LOCK = "identity.json", "lock"


@dataclass(frozen=True)
class Work:
    """An open work folder. Files are written under a temporary name and renamed, so an existing file is complete."""

    folder: Path
    threads: int  # a resumed training needs as many, for its sums to be the same
    lock: IO[str] = field(repr=False)  # held by the training process

    @classmethod
    def open(cls, folder: Path, identity: Mapping[str, Any], resume: bool, force: bool) -> Work:
        """Create the folder, or reopen it if `resume` is true.

        Args:
            folder: Where the training is kept.
            identity: What the training depends on; a resumed training must have the same.
            resume: Whether to continue the training in the folder.
            force: Whether to replace an unfinished training.

        Raises:
            OptionError: There is nothing to resume, or it has another identity.
            OutputError: The folder is damaged, locked by another process, in the way, or cannot be written.
        """
        identity = json.loads(json.dumps(identity))
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise OutputError(f"{folder} is in the way, and no folder: remove it, or give another --output")
        if resume:
            return cls(folder, _check(folder, identity), _lock(folder))
        if folder.exists():
            if (folder / IDENTITY).is_file():
                if not force:
                    raise OutputError(
                        f"{folder} holds an unfinished training: go on with --resume, or replace it with --force"
                    )
            elif any(path.name != LOCK and not path.name.startswith(f".{IDENTITY}.") for path in folder.iterdir()):
                raise OutputError(f"{folder} is no training, so --force will not replace it: give another --output")
            with _lock(folder):
                shutil.rmtree(folder)
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise OutputError(f"{folder} cannot be written ({error.strerror}): give another --output") from None
        threads = torch.get_num_threads()
        lock = _lock(folder)
        write(folder / IDENTITY, json.dumps({"threads": threads, "identity": identity}).encode())
        return cls(folder, threads, lock)

    def kept(self, name: str, make: Callable[[], Arrays]) -> Arrays:
        """Return the arrays saved under this name, or make and save them. Raises OutputError."""
        path = self.folder / f"{name}.safetensors"
        if not path.is_file():
            arrays = make()
            self.save(name, {key: torch.from_numpy(value) for key, value in arrays.items()}, {})
            return arrays
        try:
            return dict(load_file(path))
        except SafetensorError as error:
            raise OutputError(f"{path} is damaged ({one_line(error)}): begin again with --force") from None

    def save(self, name: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Atomically replace the file of this name; `about` is stored as JSON metadata. Raises OutputError."""
        path = self.folder / f"{name}.safetensors"
        temporary = path.with_suffix(".tmp")
        try:
            save_file(
                {key: value.contiguous() for key, value in tensors.items()}, temporary, {"json": json.dumps(about)}
            )
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
        except (OSError, SafetensorError) as error:
            raise OutputError(f"{path} cannot be written ({one_line(error)}): free some space, then --resume") from None

    def load(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return the tensors and metadata that `save` wrote, or None if there are none. Raises OutputError."""
        path = self.folder / f"{name}.safetensors"
        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                about = decode(file.metadata()["json"])
                return {key: file.get_tensor(key) for key in file.keys()}, about  # noqa: SIM118
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise OutputError(f"{path} is damaged ({one_line(error)}): begin again with --force") from None

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.folder)


def _lock(folder: Path) -> IO[str]:
    """Lock the folder until the returned file is closed or the process ends.

    Raises OutputError if another process holds the lock.
    """
    try:
        file = (folder / LOCK).open("w")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputError(f"another process trains in {folder}: wait for it, or stop it") from None
    except OSError as error:
        raise OutputError(f"{folder} cannot be written ({error.strerror}): give another --output") from None
    return file


def _check(folder: Path, identity: Mapping[str, Any]) -> int:
    """Return the thread count of the training in the folder.

    Raises OptionError if its identity differs or nothing is there, and OutputError if it is damaged.
    """
    try:
        content = decode(read_text(folder / IDENTITY))
        threads, known = int(content["threads"]), dict(content["identity"])
    except FileNotFoundError:
        raise OptionError(f"there is no {folder} to go on with: drop --resume") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OutputError(f"{folder} is damaged ({one_line(error)}): begin again with --force") from None
    for name in {**known, **identity}:
        if known.get(name) != identity.get(name):
            what = f"--{flag(name)} {known.get(name)}, not {identity.get(name)}"
            if name.endswith("_sha256"):
                what = f"another {name.removesuffix('_sha256')}"
            raise OptionError(f"{folder} was made with {what}: give the same, or begin again with --force")
    return threads
