"""Pieces of a turn, the turn that they form, and the base class of parsers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Kind = Literal["reasoning", "content", "call", "arguments"]
Step = Callable[[], bool]


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

    A subclass's steps read `_rest`, take from it what is certain, and return whether there may be more to do.
    """

    def __init__(self) -> None:
        self._rest, self._pieces, self._calls = "", list[Piece](), 0
        self._step: Step = self._begin

    @abstractmethod
    def _begin(self) -> bool:
        """The first step; returns whether there may be more to do."""

    @abstractmethod
    def _finish(self) -> None:
        """Emit the text that was held back, at its end."""

    def feed(self, text: str) -> list[Piece]:
        """Return the pieces that more of the text makes certain."""
        self._rest += text
        while self._step():
            pass
        return self._told()

    def end(self) -> list[Piece]:
        """Return the pieces that are certain because the text has ended."""
        self._finish()
        return self._told()

    def _told(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _take(self, count: int) -> str:
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken

    def _say(self, text: str) -> None:
        if text:
            self._pieces.append(Piece("content", text))

    def _say_all(self) -> bool:
        """A step that emits everything as content."""
        self._say(self._take(len(self._rest)))
        return False


def held(text: str, markers: Sequence[str]) -> int:
    """Return how many of a text's last characters may be the beginning of a marker."""
    longest = max(map(len, markers), default=1) - 1
    sizes = range(min(longest, len(text)), 0, -1)
    return next((size for size in sizes if any(each.startswith(text[-size:]) for each in markers)), 0)
