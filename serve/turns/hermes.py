"""Calls as Hermes' and Qwen's templates write them: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

from __future__ import annotations

from .calls import MarkedParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes(MarkedParser):
    """What is no call stays content, its tags too; a call whose last tag is missing is one."""

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
