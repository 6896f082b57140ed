"""Scripts as modules, and as commands."""

import importlib
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def import_script():
    """`import_script("checkpoints/inflate")`: one of `scripts/`, as a module."""

    def load(name):
        folder, module = name.split("/")
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(ROOT / "scripts" / folder)
            return importlib.import_module(module)

    return load


@pytest.fixture(scope="session")
def run():
    """`run(command…, **environment)`: a command in the repository, which may take a stage's time and no more."""
    return lambda *command, **environment: subprocess.run(
        [*map(str, command)], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=480
    )
