"""What can be read off a grammar in Lark: whether it names tokens, and whether it has a finite text at all."""

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
