"""Pieces of a turn, the turn that they form, and the base class of parsers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

Kind = Literal["reasoning", "content", "call", "arguments"]
Value = TypeVar("Value")
Waits = Generator[None, None, Value]  # yields to wait for more text


class Piece(NamedTuple):
    """A part of a turn's text. A `call` begins a call of the tool that `text` names; `number`: which call it is of."""

    kind: Kind
    text: str
    number: int = 0


@dataclass(slots=True)
class Call:
    """A tool call; `arguments`: JSON as the model wrote it, incomplete if its text was cut off."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class Turn:
    """A turn, which its pieces form."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> Turn:
        """Return the turn of these pieces."""
        turn = cls()
        for piece in pieces:
            turn.add(piece)
        return turn

    def add(self, piece: Piece) -> None:
        """Add the next piece."""
        if piece.kind == "reasoning":
            self.reasoning += piece.text
        elif piece.kind == "content":
            self.content += piece.text
        elif piece.kind == "call":
            self.calls.append(Call(piece.text))
        else:
            self.calls[piece.number].arguments += piece.text


class Parser(ABC):
    """Reads a text as it arrives. The pieces, put together, are the same however the text was cut.

    A subclass's `_read` takes from `_rest` what is certain, and yields to wait for more text or for its end.
    """

    def __init__(self) -> None:
        self._rest, self._ended, self._pieces = "", False, list[Piece]()
        self._calls, self._called = 0, False  # `_called`: whether a call has just ended
        self._reader = self._read()

    @abstractmethod
    def _read(self) -> Waits[None]:
        """Read the whole text."""

    def feed(self, text: str) -> list[Piece]:
        """Return the pieces that more of the text makes certain."""
        self._rest += text
        next(self._reader, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    def end(self) -> list[Piece]:
        """Return the pieces that are certain because the text has ended."""
        self._ended = True
        return self.feed("")

    def _take(self, count: int) -> str:
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken

    def _begin_call(self, name: str) -> None:
        self._pieces.append(Piece("call", name, self._calls))
        self._calls += 1

    def _emit(self, kind: Kind, text: str) -> None:
        """Emit a text, unless it is empty; arguments are of the latest call."""
        if text:
            self._pieces.append(Piece(kind, text, self._calls - 1 if kind == "arguments" else 0))

    def _pass(self, marker: str = "", kind: Kind = "content") -> Waits[bool]:
        """Pass a text on up to a marker, which is taken; return whether there is one. Space behind calls is dropped."""
        while True:
            at = self._rest.find(marker) if marker else -1
            size = at
            if at < 0:
                size = len(self._rest) - (0 if self._ended else held(self._rest, marker))
            if self._rest[:size].strip() or not self._called:
                self._emit(kind, self._take(size))
                self._called = False
            if at >= 0:
                self._take(self._rest.index(marker) + len(marker))
                return True
            if self._ended:
                return False
            yield

    def _space(self) -> Waits[str]:
        """Take all space and return it, once it is known where it ends."""
        while not self._rest.strip() and not self._ended:
            yield
        return self._take(len(self._rest) - len(self._rest.lstrip()))

    def _word(self, word: str) -> Waits[str]:
        """Take a word with the space before it and return both; "" if the text goes on with anything else."""
        while word.startswith(found := self._rest.lstrip()) and found != word and not self._ended:
            yield
        return self._take(len(self._rest) - len(found) + len(word)) if found.startswith(word) else ""


def held(text: str, marker: str) -> int:
    """Return how many of a text's last characters may be the beginning of a marker."""
    sizes = range(min(len(marker) - 1, len(text)), 0, -1)
    return next((size for size in sizes if marker.startswith(text[-size:])), 0)
