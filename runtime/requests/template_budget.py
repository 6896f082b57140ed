"""The budget of work for rendering a chat template, charged before each operation or during it.

A unit of work is about one character copied, so that the budget bounds both time and memory, and the same template with
the same messages always ends in the same way. Nothing here imports jinja2.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import Any

WORK = 2**24  # units for a chat of weight 0
WORK_PER_UNIT = 16  # further units for each unit of the chat's weight
NODE, VALUE = 8, 16  # units per evaluated node of the template, and per value besides its characters
MAX_DEPTH = 100  # maximum nesting of lists
MAX_BITS = 4096  # maximum bits of a number
_PLACES = re.compile(r"%(?:%|(?:\([^()]{0,64}\))?[-#0 +]{0,8}\d{0,3}(?:\.\d{0,3})?[a-zA-Z])")
_PADS = frozenset({"center", "ljust", "rjust", "zfill"})
_SPLITS = frozenset({"split", "rsplit", "splitlines"})
_LINEAR = (
    "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit isidentifier islower "
    "isnumeric isprintable isspace istitle isupper lower lstrip partition removeprefix removesuffix rfind rindex "
    "rpartition rstrip startswith strip swapcase title upper"
)
_METHODS: dict[type, frozenset[str]] = {  # methods that a template may call, by type of value
    str: frozenset(_LINEAR.split()) | _PADS | _SPLITS | {"join", "replace"},
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
}
_CONTAINERS: tuple[type[Any], ...] = (list, tuple, set, frozenset, type({}.keys()), type({}.values()), type({}.items()))


class OverBudgetError(Exception):
    """A template exceeded its budget, or did something whose cost has no bound."""


class _Budget:
    __slots__ = ("left",)

    def __init__(self, work: int) -> None:
        self.left = work


_budget: ContextVar[_Budget] = ContextVar("budget")


@contextmanager
def budget(weight: int) -> Iterator[None]:
    """Set the budget of one rendering in this thread; `weight`: see `Chat.weight`."""
    token = _budget.set(_Budget(WORK + WORK_PER_UNIT * weight))
    try:
        yield
    finally:
        _budget.reset(token)


def charge(work: int) -> None:
    """Take units from the budget; raise OverBudgetError if it is used up, LookupError outside of a rendering."""
    now = _budget.get()
    now.left -= work
    if now.left < 0:
        raise OverBudgetError("it does too much work, in loops or with long texts")


def weigh(value: Any) -> int:
    """Return the units of a whole value, counting shared parts each time they occur; raises OverBudgetError."""
    if isinstance(value, str):
        return VALUE + len(value)
    weight, left, parts = 0, _budget.get().left, [iter((value,))]
    while parts:
        for item in parts[-1]:
            inner: Iterator[Any] | None = None
            weight += VALUE
            if isinstance(item, str):
                weight += len(item)
            elif isinstance(item, int):
                weight += item.bit_length() >> 3
            elif isinstance(item, dict):
                inner = chain(item.keys(), item.values())
            elif isinstance(item, _CONTAINERS):
                inner = iter(item)
            elif isinstance(item, range):
                weight += VALUE * len(item)
            if weight > left:
                raise OverBudgetError("it makes values that are too large")
            if inner is not None:
                parts.append(inner)
                if len(parts) > MAX_DEPTH:
                    raise OverBudgetError(f"it nests lists more than {MAX_DEPTH} deep")
                break
        else:
            parts.pop()
    return weight


def charge_operator(operator: str, left: Any, right: Any) -> None:
    """Charge for a binary operator before it is applied; raises OverBudgetError."""
    if isinstance(left, str) and operator == "%":
        charge_printf(left, right)
        return
    if isinstance(left, int) and isinstance(right, int):
        bits = max(left.bit_length(), right.bit_length())
        if operator == "**" and right > 0:
            bits = max(bits, left.bit_length() * right)
        if bits > MAX_BITS:
            raise OverBudgetError(f"it counts with numbers of more than {MAX_BITS} bits")
        charge(VALUE)
        return
    times = 1
    if operator == "*":
        times = max(0, next((each for each in (left, right) if isinstance(each, int)), 1))
    charge(VALUE + times * (_flat(left) + _flat(right)))


def _flat(value: Any) -> int:
    """Return the units of a shallow copy; for a tuple of everything in it, because its hash reads all."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list):
        return NODE * len(value)
    return weigh(value) if isinstance(value, tuple) else 0


def charge_printf(text: str, given: Any) -> None:
    """Charge for `text % given`; raises OverBudgetError for widths of more than three digits."""
    places = len(_PLACES.findall(text))
    if "%" in _PLACES.sub("", text):
        raise OverBudgetError("it has a format that is none, or wider than 999")
    charge(len(text) + places * (1000 + weigh(given)))


def charge_format(value: Any, spec: str) -> None:
    """Charge for one field of `str.format`; raises OverBudgetError for widths of more than three digits."""
    if re.search(r"\d{4}", spec):
        raise OverBudgetError("it has a format that is wider than 999")
    charge(1000 + len(spec) + weigh(value))


def charge_pad(text: Any, width: Any = 80, *_: Any, **__: Any) -> None:
    """Charge for padding a text to a width."""
    charge(weigh(text) + (max(0, width) if isinstance(width, int) else 0))


def charge_replace(text: Any, old: Any, new: Any, *_: Any, **__: Any) -> None:
    """Charge for `text.replace(old, new)`."""
    charge(weigh(text) + weigh(old) + weigh(new) + str(text).count(str(old)) * len(str(new)))


def charge_join(separator: Any, items: Any) -> None:
    """Charge for `separator.join(items)`."""
    count = len(items) if isinstance(items, Sequence | Mapping | set) else 0
    charge(weigh(items) + weigh(separator) + count * len(str(separator)))


def charge_method(owner: Any, name: str, args: tuple[Any, ...]) -> None:
    """Charge for calling a value's own method; raise OverBudgetError for a method that no template needs."""
    kind = next((kind for kind in _METHODS if isinstance(owner, kind)), None)
    if kind is None or name not in _METHODS[kind]:
        raise OverBudgetError(f"it calls {type(owner).__name__}.{name}, which chat templates may not")
    if name == "join" and args:
        charge_join(owner, args[0])
    elif name == "replace" and len(args) > 1:
        charge_replace(owner, *args)
    elif name in _PADS and args:
        charge_pad(owner, *args)
    else:
        charge(sum(map(weigh, args)) + (VALUE if kind is dict else weigh(owner)))
        if name in _SPLITS:
            by = args[0] if args and isinstance(args[0], str) and args[0] else None
            charge(VALUE * (owner.count(by) if by else len(owner) // 2))
