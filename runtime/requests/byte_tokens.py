"""The bytes that a token's name stands for, in the two notations that tokenizers have for partial characters."""

from __future__ import annotations

import re

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _alphabet() -> dict[str, int]:
    """Return GPT-2's byte-level alphabet: the byte that each of 256 printable characters stands for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _alphabet()


def byte_fallback(name: str) -> bytes | None:
    """Return the byte of a name such as "<0x0A>", as SentencePiece writes it; None for other names."""
    found = _FALLBACK.fullmatch(name)
    return bytes([int(found[1], 16)]) if found else None


def byte_level(name: str) -> bytes | None:
    """Return the bytes of a name in GPT-2's alphabet; None if it has another character."""
    try:
        return bytes(map(_BYTES.__getitem__, name))
    except KeyError:
        return None
