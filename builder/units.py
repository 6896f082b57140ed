"""Bytes as people read them."""

from __future__ import annotations

_UNITS = "bytes", "kB", "MB", "GB", "TB", "PB"


def in_bytes(count: float) -> str:
    """Return a number of bytes with two or three digits: "640 MB", "1.9 GB"."""
    place = 0
    while count >= 999.5 and place < len(_UNITS) - 1:
        count, place = count / 1000, place + 1
    digits = 1 if place > 0 and count < 9.95 else 0
    return f"{count:.{digits}f} {_UNITS[place]}"
