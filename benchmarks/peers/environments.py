"""Virtual environments of the peers, made once from their pinned requirements."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.peers.worker import PeerError

HERE = Path(__file__).resolve().parent


def python(name: str, folder: Path) -> Path:
    """Return the interpreter of a peer's environment in `folder`, which is remade if its requirements have changed.

    specbuild's environment is the current one. Raises PeerError if the environment cannot be made.
    """
    if name == "specbuild":
        return Path(sys.executable)
    requirements, venv = (HERE / f"{name}.txt").read_text(encoding="utf-8"), folder / "venv"
    interpreter, note = venv / "bin" / "python", venv / "requirements.txt"
    if note.is_file() and note.read_text(encoding="utf-8") == requirements:
        return interpreter
    print(f"{name}: making {venv}", file=sys.stderr)
    shutil.rmtree(venv, ignore_errors=True)
    pip = [interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    for command in ([sys.executable, "-m", "venv", venv], [*pip, "--requirement", HERE / f"{name}.txt"]):
        if status := subprocess.run(list(map(str, command)), stdout=sys.stderr).returncode:
            shutil.rmtree(venv, ignore_errors=True)
            raise PeerError(f"{name}: {venv} could not be made (status {status}, see above): leave it out with --only")
    note.write_text(requirements, encoding="utf-8")
    return interpreter
