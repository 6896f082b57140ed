"""Base classes of the parsers whose calls are JSON objects, one by one or in a list."""

from __future__ import annotations

from .json_text import CallText
from .parser_base import Parser, Waits


class CallParser(Parser):
    """Reads calls that are JSON objects; `keys`: the names that their arguments may have."""

    keys: tuple[str, ...] = ("arguments",)

    def _call(self, gap: str) -> Waits[bool]:
        """Read a call and return whether it is whole; `gap`: text before it, which is content if it is no call."""
        call, number = CallText(self.keys), self._calls
        while True:
            self._take(call.feed(self._rest))
            if call.begun:
                if number == self._calls:
                    self._begin_call(call.name or "")
                self._emit("arguments", call.arguments())
            if call.state != "open" or self._ended:
                break
            yield
        if not call.begun:
            self._give_up(gap, call)
        return call.state == "whole"

    def _give_up(self, gap: str, call: CallText) -> None:
        """Emit the text of what is not certainly a call."""
        self._emit("content", gap + "".join(call.characters))


class ListParser(CallParser):
    """Reads a text that is a list of calls, if it begins as one."""

    def _read(self) -> Waits[None]:
        while not self._rest and not self._ended:
            yield
        if self._rest.startswith("["):
            yield from self._list("")
        yield from self._pass()

    def _list(self, gap: str) -> Waits[None]:
        """Read a list of calls from its bracket on; `gap`: the text before it."""
        gap += self._take(1)
        while True:
            gap += yield from self._space()
            self._called = yield from self._call(gap)
            if not (self._called and (yield from self._word(","))):
                break
            gap = ""
        if self._called:
            yield from self._word("]")


class RequiredParser(ListParser):
    """Reads a text that is constrained to a list of calls. A call that a limit cut is a call once its name is known.

    What is left of a call without a name is dropped: it is nothing that the model said.
    """

    def _give_up(self, gap: str, call: CallText) -> None:
        if call.state == "broken":
            super()._give_up(gap, call)
        elif call.name is not None:
            self._begin_call(call.name)


class NamedParser(Parser):
    """Reads a text that is the arguments of one tool, to which a named `tool_choice` constrains it."""

    def __init__(self, name: str) -> None:
        self._name = name
        super().__init__()

    def _read(self) -> Waits[None]:
        self._begin_call(self._name)
        yield from self._pass(kind="arguments")
