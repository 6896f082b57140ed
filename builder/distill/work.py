"""The folder of an unfinished training: what it was asked for, and all that would have to be done again."""

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
    """Files are written beside their place and renamed into it: what is there is whole."""

    folder: Path
    threads: int  # sums are the same only in as many parts
    lock: IO[str] = field(repr=False)  # of the process that trains

    @classmethod
    def open(cls, folder: Path, identity: Mapping[str, Any], resume: bool, force: bool) -> Work:
        """A new folder, or with `resume` the one that is there, if it was for the same. Raises InputError."""
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
        """What was made before under this name, or is made now."""
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
        """Replace a file. Raises OutputError."""
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
        """What `save` wrote; None where it did not. Raises OutputError."""
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
        """All of it."""
        shutil.rmtree(self.folder)


def _lock(folder: Path) -> IO[str]:
    """Held until it is closed, or the process ends however it may. Raises OutputError where another process has it."""
    try:
        file = (folder / LOCK).open("w")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputError(f"another process trains in {folder}: wait for it, or stop it") from None
    except OSError as error:
        raise OutputError(f"{folder} cannot be written ({error.strerror}): give another --output") from None
    return file


def _check(folder: Path, identity: Mapping[str, Any]) -> int:
    """The threads of the training that is there; raises OptionError where it was for something else."""
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
