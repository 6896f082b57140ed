"""JSON that arrives in parts: finds where an object ends, and its direct members."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from string import hexdigits
from typing import Literal

State = Literal["open", "whole", "broken"]
Reader = Generator[None, str, str]  # is sent characters, and returns the first one that it does not read
_SPACE, _LITERALS, _CLOSES = " \t\n\r", {"t": "rue", "f": "alse", "n": "ull"}, {"{": "}", "[": "]"}
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_DEPTH = 128


class ObjectText:
    """Reads one JSON object, character by character; stops behind it, or before a character that breaks it."""

    def __init__(self) -> None:
        self.state: State = "open"
        self.characters = list[str]()  # all that were read
        self._reader = self._whole()
        next(self._reader)

    def feed(self, text: str) -> int:
        """Read a text; return how many of its characters were read, which are all while the object is open."""
        for place, character in enumerate(text):
            if self.state != "open":
                return place
            self.characters.append(character)
            try:
                self._reader.send(character)
            except StopIteration:
                self.state = "whole"
            except ValueError:
                self.characters.pop()
                self.state = "broken"
                return place
        return len(text)

    def _whole(self) -> Generator[None, str, None]:
        _require((yield) == "{")
        yield from self._collection("{", 1)

    def _collection(self, opening: str, depth: int) -> Generator[None, str, None]:
        """Read an object or an array, behind its opening character."""
        character = yield from _next()
        while character != _CLOSES[opening]:
            key, begin = "", len(self.characters) - 1
            if opening == "{":
                _require(character == '"')
                yield from _string()
                key = json.loads("".join(self.characters[begin:]))
                _require((yield from _next()) == ":")
                character, begin = (yield from _next()), len(self.characters) - 1
            if depth == 1:
                self._begin_member(key, character)
            character = yield from self._value(character, depth)
            if depth == 1:
                self._end_member(key, "".join(self.characters[begin:-1]))
            character = yield from _next(character)
            if character == ",":
                character = yield from _next()
                _require(character not in "]}")
            else:
                _require(character == _CLOSES[opening])

    def _value(self, first: str, depth: int) -> Reader:
        if first in _CLOSES:
            _require(depth < _DEPTH)
            yield from self._collection(first, depth + 1)
        elif first == '"':
            yield from _string()
        elif first in _LITERALS:
            for expected in _LITERALS[first]:
                _require((yield) == expected)
        else:
            return (yield from _number(first))
        return (yield)

    def _begin_member(self, key: str, first: str) -> None:
        """Note that a value of one of the object's own members begins; raises ValueError if it may not."""

    def _end_member(self, key: str, value: str) -> None:
        """Note the value of one of the object's own members; raises ValueError if it is wrong."""


def _require(right: bool) -> None:
    if not right:
        raise ValueError


def _next(character: str = " ") -> Reader:
    """Read to the first character that is no space, from this one on."""
    while character in _SPACE:
        character = yield
    return character


def _string() -> Generator[None, str, None]:
    """Read a string behind its opening quote."""
    while (character := (yield)) != '"':
        _require(character >= " ")
        if character == "\\":
            escaped = yield
            _require(escaped in '"\\/bfnrtu')
            for _ in range(4 if escaped == "u" else 0):
                _require((yield) in hexdigits)


def _number(text: str) -> Reader:
    _require(text in "-0123456789")
    while (character := (yield)) in "-+.eE0123456789":
        text += character
    _require(_NUMBER.fullmatch(text) is not None)
    return character


class CallText(ObjectText):
    """Reads an object that is a call, such as `{"name": "f", "arguments": {…}}`, with its members in any order.

    A whole object that is no call is broken. `name`: None until it is known.
    """

    def __init__(self, keys: tuple[str, ...] = ("arguments",)) -> None:
        """`keys`: the names that the arguments, which are an object, may have."""
        super().__init__()
        self.name: str | None = None
        self._keys, self._argues = keys, False  # `_argues`: whether the current member has the arguments
        self._said, self._end = 0, 0  # places of characters; the end is -1 while the arguments go on

    @property
    def begun(self) -> bool:
        """Return whether its name and the beginning of its arguments are known, so that it is a call for certain."""
        return self.name is not None and self._end != 0

    def feed(self, text: str) -> int:
        """See `ObjectText.feed`."""
        count = super().feed(text)
        if self.state == "whole" and not self.begun:
            self.state = "broken"
        return count

    def arguments(self) -> str:
        """Return the part of the arguments that was read since the last call of this method."""
        end = len(self.characters) if self._end < 0 else self._end
        said = "".join(self.characters[self._said : end])
        self._said = end
        return said

    def _begin_member(self, key: str, first: str) -> None:
        self._argues = key in self._keys and not self._end
        if self._argues:
            _require(first == "{")
            self._said, self._end = len(self.characters) - 1, -1

    def _end_member(self, key: str, value: str) -> None:
        if self._argues:
            self._end = len(self.characters) - 1
        if key == "name" and self.name is None:
            name = json.loads(value)
            _require(isinstance(name, str) and name != "" and name.isprintable())
            self.name = name
