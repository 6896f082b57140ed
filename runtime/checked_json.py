"""A bundle's JSON files: read once, within bounds, and checked against a type before anything in them is believed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

JSON_BYTES = 64 << 20  # of any JSON file but the manifest
T = TypeVar("T")
Text = Annotated[str, Meta(max_length=4096)]
Seconds = Annotated[float, Meta(ge=0, le=1e6)]
Probability = Annotated[float, Meta(ge=0, le=1)]


def decode(data: bytes) -> Any:
    """The value of a JSON text; raises ValueError for one that is not strict JSON in UTF-8.

    NaN, infinity, a key that occurs twice, half a surrogate pair, numbers of thousands of digits and nesting beyond
    Python's recursion limit are refused.
    """
    try:
        value = json.loads(
            data.decode(), object_pairs_hook=_object, parse_constant=_no_number, parse_float=_finite_float
        )
        msgspec.json.encode(value)  # half a surrogate pair is no text
    except (RecursionError, OverflowError, MemoryError) as error:
        raise ValueError(str(error) or "too deep or too large") from None
    return value


def checked(value: Any, kind: type[T]) -> T:
    """A value of JSON as a type; raises ValueError for another type, a number out of bounds or an unknown field."""
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
    """Conversion drops fields that a dataclass does not have: raise ValueError for them."""
    if isinstance(given, Mapping):
        if unknown := given.keys() - known.keys():
            raise ValueError(f"unknown fields {', '.join(sorted(unknown))[:200]} at {at}")
        for name, value in given.items():
            _refuse_unknown(value, known[name], f"{at}.{name}")
