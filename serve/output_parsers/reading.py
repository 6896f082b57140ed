"""How a server reads turns: the parsers of calls and reasoning by name, and a reader of one turn."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from specbuild.runtime.errors import OptionError, shown

from . import hermes, llama3, mistral, pattern
from .parser_base import Parser, Piece, Turn, Waits
from .reasoning import Reasoning

_EXPRESSION = "regex:"
_PARSERS: dict[str, type[Parser]] = {"hermes": hermes.Hermes, "llama3_json": llama3.Llama3, "mistral": mistral.Mistral}
_MARKERS = {"mistral": (mistral.OPEN, "[ARGS]", "[CALL_ID]")}  # markers that a tokenizer may treat as special tokens


class Plain(Parser):
    """Reads a text that is content only."""

    def _read(self) -> Waits[None]:
        yield from self._pass()


@dataclass(frozen=True, slots=True)
class Reading:
    """Options for reading turns; validated on construction.

    Args:
        tool_call_parser: Form of the calls that a model makes on its own: "hermes", "llama3_json", "mistral" or
            "regex:EXPRESSION".
        auto_tool_choice: Whether a model may call tools on its own.
        reasoning_parser: A model family or "START,END", see `Reasoning.of`; None: reasoning is not told from content.

    Raises:
        OptionError: If a parser is unknown or its expression is wrong.
    """

    tool_call_parser: str = "hermes"
    auto_tool_choice: bool = True
    reasoning_parser: str | None = None
    reasoning: Reasoning | None = field(init=False, default=None)
    _expression: re.Pattern[str] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        name = self.tool_call_parser
        if name.startswith(_EXPRESSION):
            object.__setattr__(self, "_expression", pattern.expression(name.removeprefix(_EXPRESSION)))
        elif name not in _PARSERS:
            known = ", ".join(_PARSERS)
            raise OptionError(f"tool_call_parser is {shown(name)}, none of {known}: or give regex:EXPRESSION")
        if self.reasoning_parser is not None:
            object.__setattr__(self, "reasoning", Reasoning.of(self.reasoning_parser))

    @property
    def constrains(self) -> bool:
        """Return whether calls that the model makes on its own can be held to a strict tool's schema."""
        return self.tool_call_parser in ("hermes", "llama3_json")

    def free(self) -> Parser:
        """Return a parser of calls that the model makes on its own."""
        return pattern.Pattern(self._expression) if self._expression else _PARSERS[self.tool_call_parser]()

    def markers(self, tools: bool) -> tuple[str, ...]:
        """Return the tokens that a text must show even if they are special; `tools`: whether it may have calls."""
        reasoning = (self.reasoning.start, self.reasoning.end) if self.reasoning else ()
        return (*reasoning, *(_MARKERS.get(self.tool_call_parser, ()) if tools else ()))


class TurnReader:
    """Reads one turn as it arrives; `turn` is all of it so far."""

    def __init__(self, parser: Parser, several: bool = True) -> None:
        """`several`: whether there may be more than one call; if not, what follows the first is dropped."""
        self.turn, self._parser, self._several = Turn(), parser, several

    def feed(self, text: str, ended: bool) -> list[Piece]:
        """Return the pieces that a text makes certain; `ended`: whether it is the last text."""
        pieces = self._parser.feed(text) + (self._parser.end() if ended else [])
        kept = list[Piece]()
        for piece in pieces:
            spoken = piece.kind in ("content", "reasoning")
            if self._several or (piece.number == 0 and not (spoken and self.turn.calls)):
                self.turn.add(piece)
                kept.append(piece)
        return kept
