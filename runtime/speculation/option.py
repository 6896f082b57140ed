"""What a round of a sequence might do, and what that promises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["plain", "lookup", "habit", "model", "probe", "forced"]


@dataclass(frozen=True, slots=True)
class Option:
    """Tokens that a round should emit, of all who share it, and its seconds; `nodes`: drafted, of a tree by a guess."""

    kind: Kind
    nodes: int
    tokens: float
    seconds: float
    levels: int = 0  # of the model's tree

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


PLAIN = Option("plain", 0, 1.0, 1.0)
