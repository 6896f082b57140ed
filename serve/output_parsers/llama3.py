"""Calls in the form of Llama 3's templates: texts of `{"name": …, "parameters": {…}}`, several separated by `;`."""

from __future__ import annotations

from .calls import CallParser

TAG = "<|python_tag|>"


class Llama3(CallParser):
    """Reads a text that is either calls or content, depending on how it begins."""

    keys = ("parameters", "arguments")

    def _begin(self) -> bool:
        found = self._rest.lstrip()
        if TAG.startswith(found) and found != TAG:
            return False
        gap = self._rest[: len(self._rest) - len(found)]
        if found.startswith(TAG):
            gap, found = gap + TAG, found[len(TAG) :]
        if not found.lstrip():
            return False
        if found.lstrip()[0] != "{":
            self._step = self._say_all
            return True
        self._rest = found
        return self._expect(gap, self._reading)

    def _reading(self) -> bool:
        state = self._read()
        if state == "whole":
            self._step = self._between
        elif state == "broken":
            self._step = self._say_all
        return state != "open"

    def _between(self) -> bool:
        found = self._rest.lstrip()
        if not found:
            return False
        if found[0] != ";":
            self._step = self._say_all
            return True
        after = found[1:].lstrip()
        if not after:
            return False
        gap = self._rest[: len(self._rest) - len(after)]
        self._rest = after
        return self._expect(gap, self._reading)

    def _finish(self) -> None:
        if self._step == self._reading:
            self._give_up()
        elif self._step != self._between:
            self._say(self._rest)
