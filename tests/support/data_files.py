"""What tests/data holds, and any other folder."""

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


def snapshot(folder):
    """A folder's files by their paths in it."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
