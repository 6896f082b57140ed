"""Scripts as modules."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="session")
def import_script() -> Callable[[str], Any]:
    """`import_script(name)`: one of `scripts/`, as a module."""

    def load(name: str) -> Any:
        sys.path.insert(0, str(SCRIPTS))
        try:
            return importlib.import_module(name)
        finally:
            sys.path.pop(0)

    return load
