"""Rows of ledgers for tests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from data_files import table

from specbuild.measure.cost.rows import MachineRow, RequestRow, Row, line_of

ROWS = table("ledger.json")
DAY = "2026-03-0{}T{:02d}:00:00.000+00:00"


def request(number: int = 0, **given: Any) -> RequestRow:
    """Ten busy seconds for a hundred tokens, which plain decoding would have taken twenty for."""
    return RequestRow(**ROWS["request"] | {"request_id": f"r{number}"} | given)


def machine(**given: Any) -> MachineRow:
    """An hour at 3.6 of which a hundred seconds were busy: a second costs a thousandth."""
    return MachineRow(**ROWS["machine"] | given)


def written(path: Path, rows: Iterable[Row], torn: bytes = b"") -> Path:
    """A file of them."""
    path.write_bytes(b"".join(map(line_of, rows)) + torn)
    return path
