"""Scripts as modules, and as commands."""

from __future__ import annotations

import importlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def import_script() -> Callable[[str], Any]:
    """`import_script("checkpoints/inflate")`: one of `scripts/`, as a module."""

    def load(name: str) -> Any:
        folder, module = name.split("/")
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(ROOT / "scripts" / folder)
            return importlib.import_module(module)

    return load


@pytest.fixture(scope="session")
def run() -> Callable[..., Any]:
    """`run(command…, **environment)`: a command in the repository, which may take a stage's time and no more."""
    return lambda *command, **environment: subprocess.run(
        [*map(str, command)], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=480
    )
