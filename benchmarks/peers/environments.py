"""Virtual environments of the peers, made once from their pinned requirements."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

from benchmarks.peers.worker import PeerError

HERE = Path(__file__).resolve().parent


def python(name: str, folder: Path) -> Path:
    """Return the interpreter of a peer's environment in `folder`, which is remade if its requirements have changed.

    specbuild's environment is the current one, and llama.cpp's worker needs none, but its server, which is compiled.
    Raises PeerError if the environment cannot be made.
    """
    if name == "llama-cpp":
        _compile(folder)
    if name in ("specbuild", "llama-cpp"):
        return Path(sys.executable)
    requirements, venv = (HERE / f"{name}.txt").read_text(encoding="utf-8"), folder / "venv"
    interpreter, note = venv / "bin" / "python", venv / "requirements.txt"
    if note.is_file() and note.read_text(encoding="utf-8") == requirements:
        return interpreter
    print(f"{name}: making {venv}", file=sys.stderr)
    shutil.rmtree(venv, ignore_errors=True)
    pip = [interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    try:
        _run([sys.executable, "-m", "venv", venv])
        _run([*pip, "--requirement", HERE / f"{name}.txt"])
    except PeerError as error:
        shutil.rmtree(venv, ignore_errors=True)
        raise PeerError(f"{name}: {venv} could not be made: {error}; leave it out with --only") from None
    note.write_text(requirements, encoding="utf-8")
    return interpreter


def _compile(folder: Path) -> None:
    """Compile `llama-server` in `folder`/build, once, from the source of llama.cpp that PyPI's llama-cpp-python has."""
    if (folder / "build" / "bin" / "llama-server").is_file():
        return
    print(f"llama-cpp: compiling {folder / 'build'}", file=sys.stderr)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python"]
    _run([*pip, "--dest", folder, "--requirement", HERE / "llama-cpp.txt"])
    (archive,) = folder.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as source:
        source.extractall(folder, filter="data")
    (top,) = folder.glob("llama_cpp_python-*/vendor/llama.cpp")
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF"]
    _run(["cmake", "-S", top, "-B", folder / "build", *options])
    _run(["cmake", "--build", folder / "build", "--target", "llama-server", "--parallel", "2"])


def _run(command: list[Any]) -> None:
    """Run a command; raises PeerError if it fails."""
    if status := subprocess.run(list(map(str, command)), stdout=sys.stderr).returncode:
        raise PeerError(f"{' '.join(map(str, command[:3]))} … failed (status {status}, see above)")
