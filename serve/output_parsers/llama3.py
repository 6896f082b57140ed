"""Calls in the form of Llama 3's templates: texts of `{"name": …, "parameters": {…}}`, several separated by `;`."""

from __future__ import annotations

from .calls import CallParser
from .parser_base import Waits

TAG = "<|python_tag|>"


class Llama3(CallParser):
    """Reads a text that is either calls or content, depending on how it begins."""

    keys = ("parameters", "arguments")

    def _read(self) -> Waits[None]:
        gap = yield from self._word(TAG)
        gap += yield from self._space()
        self._called = yield from self._call(gap)
        while self._called and (gap := (yield from self._word(";"))):
            gap += yield from self._space()
            if not self._rest:
                return
            self._called = yield from self._call(gap)
        yield from self._pass()
