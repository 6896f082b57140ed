"""What tests/data holds."""

import json
from pathlib import Path

DATA = Path(__file__).resolve().parents[1] / "data"


def lines(name):
    """A file's lines."""
    return (DATA / name).read_text(encoding="utf-8").splitlines()


def rows(name):
    """Of a file with a JSON value a line."""
    return [*map(json.loads, lines(name))]


def table(name):
    """A file that is one JSON value."""
    return json.loads("\n".join(lines(name)))
