"""Filters and tests of chat templates that charge the rendering's budget before and after they run."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

from .template_budget import (
    VALUE,
    OverBudgetError,
    charge,
    charge_join,
    charge_pad,
    charge_printf,
    charge_replace,
    weigh,
)

MAX_INDENT = 16  # maximum indentation of `tojson`, and characters of its separators
_CHEAP = frozenset({"attr", "count", "d", "default", "first", "length"})  # read little of a value of any size
_SORTING = frozenset({"dictsort", "groupby", "max", "min", "sort", "unique"})


def tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return a value as JSON, like transformers' filter of this name; raises OverBudgetError."""
    for given in (indent, *(separators or ())):
        if (len(given) if isinstance(given, str) else given or 0) > MAX_INDENT:
            raise OverBudgetError(f"it indents or separates JSON by more than {MAX_INDENT}")
    charge(weigh(value))
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        text = encoder.encode(value)
        charge(len(text))
        return text
    pieces = []
    for piece in encoder.iterencode(value):
        charge(len(piece))
        pieces.append(piece)
    return "".join(pieces)


def charged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter or test that charges for its arguments before it runs and for its result afterwards."""
    if name in _CHEAP:
        return _uncompiled(function)
    skipped = int(hasattr(function, "jinja_pass_arg"))
    cost = _COSTS.get(name, _linear if name not in _SORTING else _sorting)

    @functools.wraps(function)
    def charging(*args: Any, **kwargs: Any) -> Any:
        args = (*args[:skipped], *(list(each) if isinstance(each, Iterator) else each for each in args[skipped:]))
        cost(*args[skipped:], **kwargs)
        result = function(*args, **kwargs)
        if isinstance(result, str):
            charge(len(result))
        return iter(_list_of(result)) if isinstance(result, Iterator) else result

    return charging


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def charging(*args: Any, **kwargs: Any) -> Any:
        charge(VALUE)
        return function(*args, **kwargs)

    return charging


def _list_of(items: Iterator[Any]) -> list[Any]:
    """Return all items as a list: a lazy iterator would do its work later, uncharged."""
    taken = []
    for item in items:
        charge(VALUE)
        taken.append(item)
    return taken


def _linear(*args: Any, **kwargs: Any) -> None:
    charge(sum(map(weigh, args)) + sum(map(weigh, kwargs.values())))


def _sorting(*args: Any, **kwargs: Any) -> None:
    charge(8 * sum(map(weigh, (*args, *kwargs.values()))))


def _indent(text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    wide = width if isinstance(width, int) else len(width)
    charge(weigh(text) + max(0, wide) * (1 + len(str(text).splitlines())))


def _grouped(items: Any, size: Any, *_: Any, **__: Any) -> None:
    charge(weigh(items) + (VALUE * max(0, size) if isinstance(size, int) else 0))


def _round(value: Any, precision: Any = 0, *_: Any, **__: Any) -> None:
    if isinstance(precision, int) and abs(precision) > 308:
        raise OverBudgetError("it rounds to more than 308 digits")
    charge(weigh(value))


def _join(items: Any, separator: Any = "", *_: Any, **__: Any) -> None:
    charge_join(separator, items)


def _sum(items: Any, attribute: Any = None, start: Any = 0) -> None:
    charge(weigh(items) * (1 if isinstance(start, int | float) else VALUE + len(items)))


def _format(text: Any, *args: Any, **kwargs: Any) -> None:
    charge_printf(str(text), kwargs or args)


_COSTS: dict[str, Callable[..., None]] = {
    "batch": _grouped,
    "center": charge_pad,
    "format": _format,
    "indent": _indent,
    "join": _join,
    "replace": charge_replace,
    "round": _round,
    "slice": _grouped,
    "sum": _sum,
}
