"""Scripts as modules, and as commands."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def import_script() -> Callable[[str], Any]:
    """`import_script("checkpoints/inflate")`: one of `scripts/`, as a module."""

    def load(name: str) -> Any:
        folder, _, module = name.partition("/")
        sys.path.insert(0, str(ROOT / "scripts" / folder))
        try:
            return importlib.import_module(module)
        finally:
            sys.path.pop(0)

    return load


@pytest.fixture(scope="session")
def run() -> Command:
    """`run(command…, **environment)`: a command in the repository, which may take a stage's time and no more."""

    def run(*command: Any, **environment: str) -> subprocess.CompletedProcess[str]:
        words, env = [*map(str, command)], os.environ | environment
        return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=480)

    return run
