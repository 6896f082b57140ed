"""Options: what a sequence might do in a round, and what that promises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["plain", "lookup", "habit", "model", "probe", "forced"]


@dataclass(frozen=True, slots=True)
class Option:
    """A choice for a round, and the tokens and seconds that it promises.

    `tokens` are of all sequences that share the round; `nodes` are drafted ones, for a tree an estimate.
    """

    kind: Kind
    nodes: int
    tokens: float
    seconds: float
    levels: int = 0  # levels of the model's tree

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


PLAIN = Option("plain", 0, 1.0, 1.0)
