"""JSON that arrives in parts: finds where an object ends, and its direct members."""

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
    """Reads one JSON object, character by character; stops behind it, or before a character that breaks it."""

    def __init__(self) -> None:
        self.state: State = "open"
        self.part = ""  # the last character's role: "key" or "value" of one of the object's own members, or ""
        self._stack, self._wants = list[str](), "{"  # name of the mode that reads the next character
        self._left, self._text = "", ""  # the rest of a literal or an escape; the number so far
        self._is_key = False

    def feed(self, text: str, start: int = 0) -> int:
        """Read a text from `start` on; return where reading stopped, which is the end while the object is open."""
        for place in range(start, len(text)):
            if self.state != "open" or not self.push(text[place]):
                return place
        return len(text)

    def push(self, character: str) -> bool:
        """Read a character; return whether it belongs to the object."""
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
    """Return the role of a character between an object's own braces and not inside a nested value."""
    if wants in ("string", "escape", "hex"):
        return "key" if key else "value"
    if wants in ("key", "key or }"):
        return "key" if character == '"' else ""
    if wants == "number":
        return "value" if character in _NUMBERS else ""
    return "value" if wants == "literal" or (wants == "value" and character not in _SPACE) else ""


class CallText:
    """Reads an object that is a call, such as `{"name": "f", "arguments": {…}}`, with its members in any order.

    `name`: None until it is known. `raw`: everything that was read before the call began.
    """

    def __init__(self, keys: tuple[str, ...] = ("arguments",)) -> None:
        """`keys`: the names that the arguments, which are an object, may have."""
        self._keys, self._object = keys, ObjectText()
        self._key, self._value = "", ""  # of the current member
        self._arguments, self._told, self._has = "", 0, False
        self.state: State = "open"  # also broken if a whole object is no call
        self.name: str | None = None
        self.raw = ""

    @property
    def begun(self) -> bool:
        """Return whether its name and the beginning of its arguments are known, so that it is a call for certain."""
        return self.name is not None and bool(self._arguments)

    def feed(self, text: str) -> int:
        """Read a text; return how many characters were read. See `ObjectText.feed`."""
        for place, character in enumerate(text):
            if self.state != "open" or not self._push(character):
                return place
        return len(text)

    def arguments(self) -> str:
        """Return the part of the arguments that was read since the last call of this method."""
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
        """Read a character of a member's value; return whether it is allowed there."""
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
    """Return the name in a JSON value; None if it is no name."""
    found = json.loads(value)
    return found if isinstance(found, str) and found and found.isprintable() else None
