"""What tests/data holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "data"


def lines(name: str) -> list[str]:
    """A file's lines."""
    return (DATA / name).read_text(encoding="utf-8").splitlines()


def rows(name: str) -> list[Any]:
    """Of a file with a JSON value a line."""
    return [*map(json.loads, lines(name))]


def table(name: str) -> Any:
    """A file that is one JSON value."""
    return json.loads("\n".join(lines(name)))
