"""Calls in the form of Hermes' and Qwen's templates: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

from __future__ import annotations

from .calls import CallParser
from .parser_base import Waits

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes(CallParser):
    """Reads tagged calls. Text that is no call stays content, with its tags; a call may lack its closing tag."""

    def _read(self) -> Waits[None]:
        while (yield from self._pass(OPEN)):
            gap = OPEN + (yield from self._space())
            self._called = yield from self._call(gap)
            if self._called and not (yield from self._word(CLOSE)) and CLOSE.startswith(self._rest.lstrip()):
                self._rest = ""  # the text ends within the closing tag
