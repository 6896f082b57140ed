"""A virtual environment for each peer, made once from its pinned requirements."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from worker import PeerError

HERE = Path(__file__).resolve().parent


def python(name: str, folder: Path) -> Path:
    """The interpreter of a peer's environment in `folder`, made anew where its requirements have changed.

    specbuild's own is the one that this runs in. Raises PeerError.
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
