"""Calls in the forms of Mistral's templates: `[TOOL_CALLS][{…}, …]`, or recently `[TOOL_CALLS]name[ARGS]{…}`."""

from __future__ import annotations

import re

from .calls import ListParser
from .json_text import ObjectText
from .parser_base import Waits

OPEN = "[TOOL_CALLS]"
_HEAD = re.compile(r"\s*([\w.-]{1,64})(\[CALL_ID\]\w{1,64})?(\[ARGS\])?\s*")
_LONGEST = 256  # maximum characters of a call's head, before its arguments


class Mistral(ListParser):
    """Reads both forms; text in neither form stays content."""

    def _read(self) -> Waits[None]:
        while (yield from self._pass(OPEN)):
            gap = yield from self._space()
            if self._rest.startswith("["):
                yield from self._list(OPEN + gap)
            else:
                self._rest = gap + self._rest
                self._called = yield from self._named()
                if not self._called:
                    self._emit("content", OPEN)

    def _named(self) -> Waits[bool]:
        """Read a call whose name is before its arguments; return whether it is one."""
        while (at := self._rest.find("{")) < 0 and not self._ended:
            if len(self._rest) > _LONGEST or OPEN in self._rest:
                return False
            yield
        head = _HEAD.fullmatch(self._rest[:at]) if 0 < at <= _LONGEST else None
        if head is None:
            return False
        self._take(at)
        self._begin_call(head[1])
        arguments = ObjectText()
        while True:
            self._emit("arguments", self._take(arguments.feed(self._rest)))
            if arguments.state != "open" or self._ended:
                return True
            yield
