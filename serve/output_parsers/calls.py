"""Base classes of the parsers whose calls are JSON objects, one by one or behind a marker."""

from __future__ import annotations

from .json_text import CallText, State
from .parser_base import Parser, Piece, Step, held


class CallParser(Parser):
    """Reads calls that are JSON objects; `keys`: the names that their arguments may have."""

    keys: tuple[str, ...] = ("arguments",)

    def __init__(self) -> None:
        self._call, self._gap = CallText(self.keys), ""  # `_gap`: text before the call, content if it is none
        super().__init__()

    def _expect(self, gap: str, step: Step) -> bool:
        """Wait for the first non-space and begin a call there, read by `step`; return whether there is more to do."""
        found = self._rest.lstrip()
        if not found:
            return False
        self._gap = gap + self._take(len(self._rest) - len(found))
        self._call, self._step = CallText(self.keys), step
        return True

    def _read(self) -> State:
        """Continue the call; an object that breaks before it is certainly a call is content."""
        before = self._call.begun
        self._take(self._call.feed(self._rest))
        if self._call.begun:
            if not before:
                self._pieces.append(Piece("call", self._call.name or "", self._calls))
                self._calls += 1
            if more := self._call.arguments():
                self._pieces.append(Piece("arguments", more, self._calls - 1))
        state = self._call.state
        if state == "broken":
            self._give_up()
        return state

    def _give_up(self) -> None:
        """Emit the call's text as content, unless it is certainly a call."""
        if not self._call.begun:
            self._say(self._gap + self._call.raw)
            self._gap = ""
            self._call = CallText(self.keys)


class MarkedParser(CallParser):
    """Reads content in which a marker begins calls; whitespace between calls and after them is dropped."""

    marker: str

    def __init__(self) -> None:
        self._behind = False  # whether a call has just ended
        super().__init__()

    def _opened(self) -> bool:
        """The step after a marker."""
        raise NotImplementedError

    def _begin(self) -> bool:
        at = self._rest.find(self.marker)
        before = self._rest[:at] if at >= 0 else self._rest[: len(self._rest) - held(self._rest, (self.marker,))]
        if before.strip() or not self._behind:
            self._say(self._take(len(before)))
            self._behind = False
        if at < 0:
            return False
        self._take(self._rest.find(self.marker) + len(self.marker))
        self._step = self._opened
        return True

    def _back(self, behind: bool) -> bool:
        self._behind, self._step = behind, self._begin
        return True

    def _finish(self) -> None:
        if self._step == self._opened:
            self._say(self.marker)
        elif self._step != self._begin:
            self._give_up()
        if self._rest.strip() or not self._behind:
            self._say(self._rest)


class ListParser(CallParser):
    """Reads a text that is a list of calls, if it begins as one."""

    def _begin(self) -> bool:
        if not self._rest:
            return False
        if self._rest[0] != "[":
            self._step = self._say_all
            return True
        return self._first_item("")

    def _first_item(self, gap: str) -> bool:
        """A step that begins a list at its bracket; `gap`: the text before it."""
        self._take(1)
        self._gap, self._step = f"{gap}[", self._item
        return True

    def _item(self) -> bool:
        return self._expect(self._gap, self._reading)

    def _reading(self) -> bool:
        state = self._read()
        if state == "whole":
            self._gap, self._step = "", self._after_item
        elif state == "broken":
            self._listed(behind=False)
        return state != "open"

    def _after_item(self) -> bool:
        found = self._rest.lstrip()
        if not found:
            return False
        if found[0] not in ",]":
            return self._listed(behind=True)
        self._rest = found[1:]
        if found[0] == "]":
            return self._listed(behind=True)
        self._step = self._item
        return True

    def _listed(self, behind: bool) -> bool:
        """Leave the list, which has ended; here the rest is content."""
        self._step = self._say_all
        return True

    def _finish(self) -> None:
        if self._step == self._item:
            self._say(self._gap + self._rest)
            self._gap = self._rest = ""
        self._give_up()


class RequiredParser(ListParser):
    """Reads a text that is constrained to a list of calls. A call that a limit cut is a call once its name is known.

    What is left of a call without a name is dropped: it is nothing that the model said.
    """

    def _finish(self) -> None:
        if self._step == self._reading and self._call.name is not None and not self._call.begun:
            self._pieces.append(Piece("call", self._call.name, self._calls))


class NamedParser(Parser):
    """Reads a text that is the arguments of one tool, to which a named `tool_choice` constrains it."""

    def __init__(self, name: str) -> None:
        self._name = name
        super().__init__()

    def _begin(self) -> bool:
        if self._rest:
            if not self._calls:
                self._pieces.append(Piece("call", self._name))
                self._calls = 1
            self._pieces.append(Piece("arguments", self._take(len(self._rest))))
        return False

    def _finish(self) -> None:
        if not self._calls:
            self._pieces.append(Piece("call", self._name))
