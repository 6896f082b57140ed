"""Calls in the forms of Mistral's templates: `[TOOL_CALLS][{…}, …]`, or recently `[TOOL_CALLS]name[ARGS]{…}`."""

from __future__ import annotations

import re

from .calls import ListParser, MarkedParser
from .json_text import ObjectText
from .parser_base import Piece

OPEN = "[TOOL_CALLS]"
_HEAD = re.compile(r"\s*([\w.-]{1,64})(\[CALL_ID\]\w{1,64})?(\[ARGS\])?\s*")
_LONGEST = 256  # maximum characters of a call's head, before its arguments


class Mistral(MarkedParser, ListParser):
    """Reads both forms; text in neither form stays content."""

    marker = OPEN

    def __init__(self) -> None:
        self._object = ObjectText()
        super().__init__()

    def _opened(self) -> bool:
        found = self._rest.lstrip()
        if not found:
            return False
        if found[0] == "[":
            return self._first_item(OPEN + self._take(len(self._rest) - len(found)))
        at = self._rest.find("{")
        if at < 0 and len(self._rest) <= _LONGEST and OPEN not in self._rest:
            return False
        head = _HEAD.fullmatch(self._rest[:at]) if 0 < at <= _LONGEST else None
        if head is None:
            self._say(OPEN)
            return self._back(behind=False)
        self._take(at)
        self._pieces.append(Piece("call", head[1], self._calls))
        self._calls += 1
        self._object, self._step = ObjectText(), self._arguing
        return True

    def _arguing(self) -> bool:
        if more := self._take(self._object.feed(self._rest)):
            self._pieces.append(Piece("arguments", more, self._calls - 1))
        if self._object.state == "open":
            return False
        return self._back(behind=True)

    def _listed(self, behind: bool) -> bool:
        return self._back(behind)

    def _finish(self) -> None:
        if self._step == self._item:
            self._say(self._gap)
            self._gap = ""
        elif self._step == self._after_item:
            self._rest, self._behind = "", True
        elif self._step == self._arguing:
            self._rest = ""
        super()._finish()
