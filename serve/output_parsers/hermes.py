"""Calls in the form of Hermes' and Qwen's templates: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

from __future__ import annotations

from .calls import MarkedParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes(MarkedParser):
    """Reads tagged calls. Text that is no call stays content, with its tags; a call may lack its closing tag."""

    marker = OPEN

    def _opened(self) -> bool:
        return self._expect(OPEN, self._reading)

    def _reading(self) -> bool:
        state = self._read()
        if state == "whole":
            self._step = self._closing
        elif state == "broken":
            self._back(behind=False)
        return state != "open"

    def _closing(self) -> bool:
        found = self._rest.lstrip()
        if CLOSE.startswith(found) and found != CLOSE:
            return False
        if found.startswith(CLOSE):
            self._rest = found[len(CLOSE) :]
        return self._back(behind=True)

    def _finish(self) -> None:
        if self._step == self._closing:
            self._rest, self._behind = "", True
        super()._finish()
