"""Reading a bundle's JSON files: once, within size bounds, and checked against a type before any value is used."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

JSON_BYTES = 64 << 20  # maximum size of any JSON file but the manifest
T = TypeVar("T")
Text = Annotated[str, Meta(max_length=4096)]
Seconds = Annotated[float, Meta(ge=0, le=1e6)]
Probability = Annotated[float, Meta(ge=0, le=1)]


def decode(data: bytes) -> Any:
    """Return the value of a JSON text; raise ValueError unless it is strict JSON in UTF-8.

    NaN, infinity, duplicate keys, half a surrogate pair, numbers of thousands of digits and nesting beyond Python's
    recursion limit are refused.
    """
    try:
        value = json.loads(
            data.decode(), object_pairs_hook=_object, parse_constant=_no_number, parse_float=_finite_float
        )
        msgspec.json.encode(value)  # raises for half a surrogate pair
    except (RecursionError, OverflowError, MemoryError) as error:
        raise ValueError(str(error) or "too deep or too large") from None
    return value


def checked(value: Any, kind: type[T]) -> T:
    """Convert a JSON value to a type; raise ValueError for a wrong type, a number out of bounds or an unknown field."""
    found = msgspec.convert(value, kind, strict=True)  # its ValidationError is a ValueError
    _refuse_unknown(value, msgspec.to_builtins(found), "$")
    return found


def _object(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key[:80]!r} occurs twice")
        found[key] = value
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a number of JSON")


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:80]} is too large")
    return number


def _refuse_unknown(given: Any, known: Any, at: str) -> None:
    """Raise ValueError for fields that a dataclass does not have: conversion would drop them."""
    if isinstance(given, Mapping):
        if unknown := given.keys() - known.keys():
            raise ValueError(f"unknown fields {', '.join(sorted(unknown))[:200]} at {at}")
        for name, value in given.items():
            _refuse_unknown(value, known[name], f"{at}.{name}")
