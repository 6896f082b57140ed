"""Tells a model's reasoning from the rest of its text, by the tokens that begin and end it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specbuild.runtime.errors import OptionError, shown

from .parser_base import Kind, Parser, Waits

TAIL = 16  # last tokens of a prompt, in which its template may begin or end a reasoning


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A model's reasoning by its beginning and end. `always`: every text begins in a reasoning, `start` or not."""

    start: str
    end: str
    always: bool = False

    @classmethod
    def of(cls, name: str) -> Reasoning:
        """Return the reasoning of a model family, or of `START,END`; raises OptionError."""
        if name in KNOWN:
            return KNOWN[name]
        start, comma, end = name.partition(",")
        if not (start and comma and end) or start == end:
            known = ", ".join(KNOWN)
            raise OptionError(
                f"reasoning_parser is one of {known}, or START,END as <think>,</think>: not {shown(name)}"
            )
        return cls(start, end)

    def in_prompt(self, tail: str) -> Literal["begun", "ended", None]:
        """Return whether the end of a prompt, given as text, begins or ends the reasoning, as some templates do."""
        said = tail.rstrip()
        if said.endswith(self.start):
            return "begun"
        return "ended" if said.endswith(self.end) else None


KNOWN = {
    "deepseek_r1": Reasoning("<think>", "</think>", always=True),
    "qwen3": Reasoning("<think>", "</think>"),
    "mistral": Reasoning("[THINK]", "[/THINK]"),
}


class ReasoningParser(Parser):
    """Reads a reasoning, and what comes after it with another parser.

    A text that never ends its reasoning is all reasoning. A text has no reasoning if it neither begins with the start
    nor is inside a reasoning from its beginning.
    """

    def __init__(self, how: Reasoning, inside: bool, after: Parser, shown_as: Kind = "reasoning") -> None:
        """Read a text with `how` as its reasoning.

        Args:
            how: The tokens that begin and end the reasoning.
            inside: Whether the text is inside a reasoning from its beginning.
            after: Reads the text after the reasoning.
            shown_as: Kind of the reasoning's pieces; as "content" they keep the end's token.
        """
        self._how, self._inside, self._after, self._kind = how, inside, after, shown_as
        super().__init__()

    def _read(self) -> Waits[None]:
        start, end = self._how.start, self._how.end
        begun = (yield from self._word(start)) if start else ""
        if begun or self._inside:
            if not (yield from self._pass(end, self._kind)):
                return
            if self._kind == "content":
                self._emit("content", end)
        while not self._ended:
            self._pieces += self._after.feed(self._take(len(self._rest)))
            yield
        self._pieces += self._after.feed(self._rest) + self._after.end()
