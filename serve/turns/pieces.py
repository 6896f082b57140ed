"""Pieces of a turn, and the turn that they make together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Kind = Literal["reasoning", "content", "call", "arguments"]
Step = Callable[[], bool]


class Piece(NamedTuple):
    """A part of a turn's text. A `call` begins one of the tool that `text` names; `number`: which call it is of."""

    kind: Kind
    text: str
    number: int = 0


@dataclass(slots=True)
class Call:
    """A call of a tool; `arguments`: JSON as the model wrote it, cut where its text is."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class Turn:
    """What pieces make together."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> Turn:
        """The turn of all its pieces."""
        turn = cls()
        for piece in pieces:
            turn.add(piece)
        return turn

    def add(self, piece: Piece) -> None:
        """The next piece."""
        if piece.kind == "reasoning":
            self.reasoning += piece.text
        elif piece.kind == "content":
            self.content += piece.text
        elif piece.kind == "call":
            self.calls.append(Call(piece.text))
        else:
            self.calls[piece.number].arguments += piece.text


class Parser(ABC):
    """Reads a text as it comes; the pieces, put together, are the same however the text was cut.

    A subclass's steps read `_rest`, take from it what is certain, and say whether there may be more to do.
    """

    def __init__(self) -> None:
        self._rest, self._pieces, self._calls = "", list[Piece](), 0
        self._step: Step = self._begin

    @abstractmethod
    def _begin(self) -> bool:
        """The first step."""

    @abstractmethod
    def _finish(self) -> None:
        """Say what was held back, at the text's end."""

    def feed(self, text: str) -> list[Piece]:
        """What more of the text makes certain."""
        self._rest += text
        while self._step():
            pass
        return self._told()

    def end(self) -> list[Piece]:
        """What is certain because no more comes."""
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
        """A step: whatever comes is content."""
        self._say(self._take(len(self._rest)))
        return False


def held(text: str, markers: Sequence[str]) -> int:
    """How many of a text's last characters may be the beginning of a marker."""
    longest = max(map(len, markers), default=1) - 1
    sizes = range(min(longest, len(text)), 0, -1)
    return next((size for size in sizes if any(each.startswith(text[-size:]) for each in markers)), 0)
