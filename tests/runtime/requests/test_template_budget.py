"""The budget of a rendering: what a value weighs, what an operation is charged, and whose a budget is."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from specbuild.runtime.requests import template_budget as module
from specbuild.runtime.requests.template_budget import (
    MAX_BITS,
    MAX_DEPTH,
    NODE,
    VALUE,
    WORK,
    WORK_PER_UNIT,
    OverBudgetError,
    budget,
    charge,
    charge_format,
    charge_join,
    charge_method,
    charge_operator,
    charge_pad,
    charge_printf,
    charge_replace,
    weigh,
)


def left() -> int:
    return module._budget.get().left


def charged(call: Any, *given: Any) -> int:
    """The units that a call takes."""
    with budget(0):
        call(*given)
        return WORK - left()


def test_a_budget_is_spent_once_and_given_back() -> None:
    with pytest.raises(LookupError):
        charge(1)
    with budget(3):
        charge(WORK + 3 * WORK_PER_UNIT)
        with budget(0):
            charge(WORK)
        for _ in range(2):
            with pytest.raises(OverBudgetError, match="too much work"):
                charge(1)
    with pytest.raises(LookupError):
        charge(1)


def test_each_thread_has_its_own() -> None:
    found: list[int] = []
    with budget(0):
        charge(5)
        thread = threading.Thread(target=lambda: found.append(charged(charge, 7)))
        thread.start()
        thread.join()
        assert (found, left()) == ([7], WORK - 5)


@pytest.mark.parametrize(
    ("value", "units"),
    [
        ("", VALUE),
        ("abc", VALUE + 3),
        (None, VALUE),
        (2**800, VALUE + 100),
        ([], VALUE),
        (["ab", ("c",)], 4 * VALUE + 3),
        ({"a": "bc"}, 3 * VALUE + 3),
        ({"a": "bc"}.values(), 2 * VALUE + 2),
        (range(10), 11 * VALUE),
        ([[1]] * 3, 7 * VALUE),
    ],
)
def test_what_a_value_weighs(value: Any, units: int) -> None:
    with budget(0):
        assert weigh(value) == units


def test_a_value_that_is_too_large_or_deep_is_not_walked_to_its_end() -> None:
    doubled: list[Any] = [1]
    for _ in range(90):
        doubled = [doubled, doubled]
    deep: list[Any] = []
    for _ in range(MAX_DEPTH):
        deep = [deep]
    with budget(0):
        with pytest.raises(OverBudgetError, match="too large"):
            weigh(doubled)
        with pytest.raises(OverBudgetError, match="deep"):
            weigh([deep])
        assert weigh(deep[0][0]) > 0


@pytest.mark.parametrize(
    ("given", "units"),
    [
        (("+", "abc", "de"), VALUE + 5),
        (("+", [1], [2, 3]), VALUE + 3 * NODE),
        (("*", "abc", 5), VALUE + 15),
        (("*", 5, [1]), VALUE + 5 * NODE),
        (("*", "abc", -5), VALUE),
        (("**", 2, MAX_BITS // 2), VALUE),
        (("**", 2, -5), VALUE),
        (("/", 1.0, 2), VALUE),
    ],
)
def test_what_an_operator_is_charged(given: Any, units: int) -> None:
    assert charged(charge_operator, *given) == units


@pytest.mark.parametrize(
    ("operator", "left", "right"), [("**", 2, MAX_BITS), ("*", 2**MAX_BITS, 1), ("%", 1, 2**MAX_BITS)]
)
def test_numbers_are_bounded(operator: str, left: int, right: int) -> None:
    with budget(0), pytest.raises(OverBudgetError, match="bits"):
        charge_operator(operator, left, right)


@pytest.mark.parametrize("text", ["%1000d", "%*d", "%.*f", "%.1000f", "%000000000000d", "%", "%(" + "a" * 65 + ")s"])
def test_a_wide_printf_is_refused(text: str) -> None:
    with budget(0), pytest.raises(OverBudgetError, match="wider"):
        charge_printf(text, 1)


@pytest.mark.parametrize("text", ["", "2024 * %s%%", "%-5d", "%(name)s", "%.3f", "%+08.3e"])
def test_a_usual_printf_is_charged(text: str) -> None:
    assert charged(charge_printf, text, "abc") >= len(text)


def test_what_grows_is_charged_by_its_result() -> None:
    assert charged(charge_pad, "ab", 100) == VALUE + 2 + 100
    assert charged(charge_replace, "aaaa", "a", "bcd") >= 12
    assert charged(charge_join, "--", ["a"] * 10) >= 30
    assert charged(charge_format, "abc", ">9") >= 3
    with budget(0), pytest.raises(OverBudgetError, match="wider"):
        charge_format(1, ">1000")


@pytest.mark.parametrize(
    ("owner", "name", "args", "units"),
    [
        ("abc", "strip", (), VALUE + 3),
        ("a b", "split", (" ",), 3 * VALUE + 4),
        ("a b", "split", (), 2 * VALUE + 3),
        ("abc", "center", (100,), VALUE + 103),
        ({"a": "b" * 1000}, "items", (), VALUE),
        ({}, "get", ("key",), 2 * VALUE + 3),
    ],
)
def test_what_a_method_is_charged(owner: Any, name: str, args: tuple[Any, ...], units: int) -> None:
    assert charged(charge_method, owner, name, args) == units


@pytest.mark.parametrize(
    ("owner", "name"),
    [("a", "encode"), ({}, "clear"), (1, "to_bytes"), ([], "sort"), (b"", "join"), (str, "maketrans")],
)
def test_other_methods_are_refused(owner: Any, name: str) -> None:
    with budget(0), pytest.raises(OverBudgetError, match=name):
        charge_method(owner, name, ())
