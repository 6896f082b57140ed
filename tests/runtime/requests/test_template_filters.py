"""Filters charge for what they read and for what they give, and `tojson` writes what transformers' does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specbuild.runtime.requests.template_budget import VALUE, WORK, OverBudgetError, budget
from specbuild.runtime.requests.template_budget import _budget as current
from specbuild.runtime.requests.template_filters import MAX_INDENT, charged, tojson


@pytest.mark.parametrize("options", [{}, {"indent": 4}, {"sort_keys": True}, {"ensure_ascii": True}, {"indent": "\t"}])
def test_json_is_what_python_writes(options: dict[str, Any]) -> None:
    value = {"b": ["é<", 1.5, None, True], "a": {}}
    with budget(0):
        assert tojson(value, **options) == json.dumps(value, **{"ensure_ascii": False} | options)
        assert current.get().left < WORK


@pytest.mark.parametrize("options", [{"indent": MAX_INDENT + 1}, {"separators": ("," * (MAX_INDENT + 1), ":")}])
def test_json_is_not_widened(options: dict[str, Any]) -> None:
    with budget(0), pytest.raises(OverBudgetError, match="more than 16"):
        tojson([1], **options)


def test_a_filter_is_charged_for_what_it_reads_and_gives() -> None:
    with budget(0):
        assert charged("upper", str.upper)("abc") == "ABC"
        assert current.get().left == WORK - VALUE - 6


def test_a_lazy_result_is_computed_where_it_is_charged() -> None:
    asked: list[int] = []
    with budget(0):
        given = charged("map", lambda items: (asked.append(each) or each for each in items))([1, 2])
        assert asked == [1, 2]
        assert next(given) == 1


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("center", ("a", 10**9)),
        ("indent", ("a\nb", 10**9)),
        ("batch", ([1], 10**9)),
        ("round", (1.5, 309)),
        ("replace", ("a" * 10**5, "a", "b" * 10**5)),
        ("join", ([1] * 10**5, "a" * 10**5)),
        ("sum", ([[1]] * 10**4, None, [])),
        ("format", ("%1000d", 1)),
    ],
)
def test_a_filter_that_grows_is_refused_before_it_runs(name: str, given: tuple[Any, ...]) -> None:
    def never(*_: Any) -> None:
        raise AssertionError

    with budget(0), pytest.raises(OverBudgetError):
        charged(name, never)(*given)
