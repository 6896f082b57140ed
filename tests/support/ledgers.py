"""Rows of ledgers for tests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from specbuild.measure.cost.rows import MachineRow, RequestRow, Row, line_of

DAY = "2026-03-0{}T{:02d}:00:00.000+00:00"


def request(number: int = 0, **given: Any) -> RequestRow:
    """Ten busy seconds for a hundred tokens, which plain decoding would have taken twenty for."""
    fields: dict[str, Any] = {
        "time": DAY.format(2, 10),
        "server": "s1",
        "request_id": f"r{number}",
        "model": "m",
        "user": "ann",
        "tenant": "t",
        "speculation": "auto",
        "finish_reasons": {"stop": 1},
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "output_tokens": 100,
        "draft_tokens": 60,
        "accepted_tokens": 50,
        "busy_seconds": 10.0,
        "plain_seconds": 20.0,
        "correction": 1.0,
    }
    return RequestRow(**fields | given)


def machine(**given: Any) -> MachineRow:
    """An hour at 3.6 of which a hundred seconds were busy: a second costs a thousandth."""
    fields: dict[str, Any] = {
        "time": DAY.format(2, 11),
        "server": "s1",
        "seconds": 3600.0,
        "busy_seconds": {"m": 100.0},
        "price_per_hour": 3.6,
        "currency": "EUR",
        "labels": {"team": "search"},
    }
    return MachineRow(**fields | given)


def written(path: Path, rows: Iterable[Row], torn: bytes = b"") -> Path:
    """A file of them."""
    path.write_bytes(b"".join(map(line_of, rows)) + torn)
    return path
