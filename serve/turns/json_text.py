"""JSON that comes in parts: where an object ends, and what its own members are."""

from __future__ import annotations

import json
import re
from typing import Literal

State = Literal["open", "whole", "broken"]
_SPACE, _LITERALS, _ESCAPES = " \t\n\r", {"t": "rue", "f": "alse", "n": "ull"}, '"\\/bfnrt'
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NUMBERS = "-+.eE0123456789"
_CLOSES = {"{": "}", "[": "]"}
_DEPTH = 256


class ObjectText:
    """Reads one JSON object, character by character, and stops behind it or before what breaks it."""

    def __init__(self) -> None:
        self.state: State = "open"
        self.part = ""  # what the last character is of: "key" or "value" of one of its own members, or neither
        self._stack, self._wants = list[str](), "{"  # what comes next: a mode's name
        self._left, self._text = "", ""  # of a literal or an escape; of a number
        self._is_key = False

    def feed(self, text: str, start: int = 0) -> int:
        """Read from a place on; where it stopped, the text's end while the object is open."""
        for place in range(start, len(text)):
            if self.state != "open" or not self.push(text[place]):
                return place
        return len(text)

    def push(self, character: str) -> bool:
        """Whether the character belongs to the object."""
        depth, wants, key = len(self._stack), self._wants, self._is_key
        right = bool(getattr(self, _MODES[wants])(character))
        self.part = ""
        if not right:
            self.state = "broken"
        elif not self._stack:
            self.state = "whole"
        elif depth and max(depth, len(self._stack)) > 1:
            self.part = "value"
        elif depth:
            self.part = _part(wants, key, character)
        return right

    def _open(self, character: str) -> bool:
        return character == "{" and self._nest(character)

    def _nest(self, character: str) -> bool:
        self._stack.append(character)
        self._wants = "key or }" if character == "{" else "value or ]"
        return len(self._stack) <= _DEPTH

    def _close(self, character: str) -> bool:
        if not self._stack or character != _CLOSES[self._stack[-1]]:
            return False
        self._stack.pop()
        self._wants = "after"
        return True

    def _value(self, character: str) -> bool:
        if character in _SPACE or (character == "]" and self._wants == "value or ]"):
            return character in _SPACE or self._close(character)
        if character in "{[":
            return self._nest(character)
        if character == '"':
            self._wants, self._is_key = "string", False
        elif character in _LITERALS:
            self._wants, self._left = "literal", _LITERALS[character]
        elif character in _NUMBERS:
            self._wants, self._text = "number", character
        else:
            return False
        return True

    def _key(self, character: str) -> bool:
        if character == '"':
            self._wants, self._is_key = "string", True
            return True
        return character in _SPACE or (character == "}" and self._wants == "key or }" and self._close(character))

    def _string(self, character: str) -> bool:
        if character == '"':
            self._wants = "colon" if self._is_key else "after"
        elif character == "\\":
            self._wants = "escape"
        return character >= " "

    def _escape(self, character: str) -> bool:
        self._wants, self._left = ("hex", "....") if character == "u" else ("string", "")
        return character == "u" or character in _ESCAPES

    def _hex(self, character: str) -> bool:
        self._left = self._left[1:]
        self._wants = "hex" if self._left else "string"
        return character in "0123456789abcdefABCDEF"

    def _literal(self, character: str) -> bool:
        right, self._left = character == self._left[0], self._left[1:]
        self._wants = "literal" if self._left else "after"
        return right

    def _number(self, character: str) -> bool:
        if character in _NUMBERS:
            self._text += character
            return True
        self._wants = "after"
        return bool(_NUMBER.fullmatch(self._text)) and self._after(character)

    def _colon(self, character: str) -> bool:
        if character == ":":
            self._wants = "value"
        return character == ":" or character in _SPACE

    def _after(self, character: str) -> bool:
        if character == ",":
            self._wants = "key" if self._stack[-1] == "{" else "value"
            return True
        return character in _SPACE or self._close(character)


_MODES = {
    **{"{": "_open", "value": "_value", "value or ]": "_value", "key": "_key", "key or }": "_key"},
    **{"string": "_string", "escape": "_escape", "hex": "_hex", "literal": "_literal", "number": "_number"},
    **{"colon": "_colon", "after": "_after"},
}


def _part(wants: str, key: bool, character: str) -> str:
    """Of a character between an object's own braces, in none that is nested."""
    if wants in ("string", "escape", "hex"):
        return "key" if key else "value"
    if wants in ("key", "key or }"):
        return "key" if character == '"' else ""
    if wants == "number":
        return "value" if character in _NUMBERS else ""
    return "value" if wants == "literal" or (wants == "value" and character not in _SPACE) else ""


class CallText:
    """Reads an object that is a call, such as `{"name": "f", "arguments": {…}}`, its members in any order.

    `name`: None until it is known. `raw`: all that was read until the call has begun.
    """

    def __init__(self, keys: tuple[str, ...] = ("arguments",)) -> None:
        """`keys`: what the arguments, an object, may be called."""
        self._keys, self._object = keys, ObjectText()
        self._key, self._value = "", ""  # of the member that is read
        self._arguments, self._told, self._has = "", 0, False
        self.state: State = "open"  # broken too where a whole object is no call
        self.name: str | None = None
        self.raw = ""

    @property
    def begun(self) -> bool:
        """Whether its name and the beginning of its arguments are there: it is a call for certain."""
        return self.name is not None and bool(self._arguments)

    def feed(self, text: str) -> int:
        """How many characters were read; see `ObjectText.feed`."""
        for place, character in enumerate(text):
            if self.state != "open" or not self._push(character):
                return place
        return len(text)

    def arguments(self) -> str:
        """What was read of the arguments since this was last asked."""
        told, self._told = self._arguments[self._told :], len(self._arguments)
        return told

    def _push(self, character: str) -> bool:
        right, part = self._object.push(character), self._object.part
        if right and part == "key":
            self._key += character
        elif right and part == "value":
            right = self._hear(character)
        elif right and self._value:
            right = self._end_member()
        if right and not self.begun:
            self.raw += character
        self.state = self._object.state if right else "broken"
        if self.state == "whole" and not self.begun:
            self.state = "broken"
        return right

    def _hear(self, character: str) -> bool:
        """A character of a member's value; whether it may be one."""
        first, self._value = not self._value, self._value + character
        if first:
            self._has = not self._arguments and json.loads(self._key) in self._keys
            if self._has and character != "{":
                return False
        if self._has:
            self._arguments += character
        return True

    def _end_member(self) -> bool:
        key, value = json.loads(self._key), self._value
        self._key, self._value, self._has = "", "", False
        if key == "name" and self.name is None:
            self.name = _text(value)
            return self.name is not None
        return True


def _text(value: str) -> str | None:
    """The name that JSON is of; None for what is none."""
    found = json.loads(value)
    return found if isinstance(found, str) and found and found.isprintable() else None
