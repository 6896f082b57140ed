"""Grammars in Lark: whether they name tokens, whether they can end, and how they force nothing without an end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from . import schemas

_PARTS = re.compile(  # what writes a text in a Lark grammar, and what surrounds it
    r"""
    //[^\n]*                                            # a comment
    | ^%ignore\s[^\n]*
    | ^%llguidance\s*\{[^\n]*
    | ^(?P<terminal>_?[A-Z][A-Z0-9_]*)(?:\.\d+)?\s*(?:\[[^\]]*\])?\s*:[^\n]*(?:\n[ \t]*\|[^\n]*)*
    | (?:"(?:\\.|[^"\\])*"i?(?:\s*\.\.\s*"(?:\\.|[^"\\])*")?)
    | /(?:\\.|[^/\\\n])+/[a-z]*
    | <[^<>\s]+>
    | %json\s*(?=\{)
    """,
    re.VERBOSE | re.MULTILINE,
)
_NEVER = "specbuild_never"  # a rule without a finite text


def names_tokens(lark: str) -> bool:
    """Return whether a grammar names tokens, such as <think> outside of its texts."""
    return any(match.group().startswith("<") for match in _PARTS.finditer(lark))


def unforced(lark: str) -> str:
    """Return a grammar in which nothing is forced if it has patterns, and the grammar itself otherwise.

    llguidance's patterns take all that they can. After `/a+/ /a+/` only a is legal, without an end: it would force
    tokens for ever, in a call that nobody can stop.
    """
    matches = [match for match in _PARTS.finditer(lark) if not match.group().startswith("//")]
    if not any(match["terminal"] or match.group().startswith("/") for match in matches):
        return lark
    header = next((match for match in matches if match.group().startswith("%llguidance")), None)
    if header is None:
        return f'%llguidance {{"no_forcing": true}}\n{lark}'
    options, end = json.JSONDecoder().raw_decode(lark, lark.index("{", header.start()))
    return f"%llguidance {json.dumps({**options, 'no_forcing': True})}{lark[end:]}"


def is_finite(lark: str, accepts_nothing: Callable[[str], bool | None]) -> bool:
    """Return whether a grammar may have a finite text; False only if it surely has none.

    Args:
        lark: The grammar.
        accepts_nothing: Returns whether a grammar allows the empty text; None if it cannot be compiled.
    """
    emptied = _emptied(lark)
    return emptied is None or accepts_nothing(emptied) is not False


def _emptied(lark: str) -> str | None:
    """Return a Lark grammar that writes nothing where this one writes something; None if it has what is not known here.

    A grammar has a finite text if, and only if, this one allows the empty text.
    """
    found, place = list[str](), 0
    while match := _PARTS.search(lark, place):
        found.append(lark[place : match.start()])
        place = match.end()
        if match["terminal"]:
            found.append(f'{match["terminal"]}: ""')
        elif match.group().startswith("%json"):
            schema, place = json.JSONDecoder().raw_decode(lark, place)
            found.append('""' if schemas.is_finite(schema) else _NEVER)
        elif not match.group().startswith(("//", "%")):
            found.append('""')
    text = "".join([*found, lark[place:], f'\n{_NEVER}: "" {_NEVER}\n'])
    return None if re.search(r"[%&]|~(?!\s*\d)", text) else text
