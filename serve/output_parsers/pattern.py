"""Calls that match a regular expression, for models whose form no other parser reads."""

from __future__ import annotations

import json
import re

from specbuild.runtime.errors import OptionError, shown

from .parser_base import Parser, Waits

_LITERAL = re.compile(r"(([^\\.^$*+?{}\[\]|()]|\\[^0-9A-Za-z])(?![*?{]))*")  # but for what may be repeated no time
_ESCAPE_OR_SET = re.compile(r"\\.|\[(\\.|[^\]\\])*\]", re.DOTALL)
_INNERMOST_GROUP = re.compile(r"\([^()]*\)")
_LONGEST = 1024  # characters of an expression


class Pattern(Parser):
    """Reads a text in which each match of an expression is a call.

    Content is passed on as it arrives, up to the literal that the expression begins with. From there on everything is
    held until the end, because only then are matches certain. Text outside of matches is content, and so is a match
    whose arguments are not a JSON object.
    """

    def __init__(self, expression: re.Pattern[str]) -> None:
        self._expression, self._literal = expression, literal(expression.pattern)
        super().__init__()

    def _read(self) -> Waits[None]:
        if not (yield from self._pass(self._literal)):
            return
        while not self._ended:
            yield
        text, place = self._literal + self._rest, 0
        for match in self._expression.finditer(text):
            if _is_object(match["arguments"]) and match["name"]:
                self._between(text[place : match.start()])
                self._begin_call(match["name"])
                self._emit("arguments", match["arguments"])
                place = match.end()
        self._between(text[place:])

    def _between(self, text: str) -> None:
        self._emit("content", text if text.strip() or not self._calls else "")


def expression(given: str) -> re.Pattern[str]:
    """Compile a regular expression that finds calls; raises OptionError."""
    if len(given) > _LONGEST:
        raise OptionError(f"the expression of calls has {len(given):,} characters, more than {_LONGEST:,}")
    try:
        made = re.compile(given, re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:
        raise OptionError(f"{shown(given)} is no regular expression ({error}): give one as Python has it") from None
    if not {"name", "arguments"} <= made.groupindex.keys():
        raise OptionError(f"{shown(given)} needs two groups, (?P<name>…) and (?P<arguments>…), the latter's match JSON")
    if not literal(given):
        raise OptionError(
            f"{shown(given)} must begin with a literal, such as <call>, by which calls are told from text"
        )
    return made


def literal(given: str) -> str:
    """Return the literal characters that every match of an expression begins with, as far as they are evident."""
    begins = _LITERAL.match(given)
    return "" if begins is None or _alternatives(given) else re.sub(r"\\(.)", r"\1", begins[0])


def _alternatives(given: str) -> bool:
    """Return whether the expression has alternatives: a bar outside of groups, sets and escapes."""
    outside, before = _ESCAPE_OR_SET.sub("", given), ""
    while outside != before:
        before, outside = outside, _INNERMOST_GROUP.sub("", outside)
    return "|" in outside


def _is_object(text: str | None) -> bool:
    try:
        return isinstance(json.loads(text or ""), dict)
    except (ValueError, RecursionError):
        return False
