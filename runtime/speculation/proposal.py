"""The records of a sequence's draft: its text's continuation, the decision, and the tree that a round verifies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .sessions import TextDrafter
from .tree import Tree, TreeSpec
from .tree_growth import Growth

Kind = Literal["plain", "lookup", "prediction", "model", "probe", "forced"]


@dataclass(frozen=True, slots=True)
class Continuation:
    """Tokens that may follow a text, where they come from, and how many tokens before them match; 0: there are none."""

    drafter: TextDrafter
    matched: int
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Decision:
    """The drafter and the size of a sequence's draft in a round.

    Attributes:
        kind: The drafter; "probe": the model's likeliest token, to see how it fares; "forced": by a constraint.
        nodes: Drafted nodes of a continuation; of a tree about so many, which bind where a device grows it.
        levels: Levels of the model's tree, which bind there too.
        speedup: The round's expected tokens a second over those of plain decoding.
    """

    kind: Kind
    nodes: int = 0
    levels: int = 0
    speedup: float = 1.0


PLAIN = Decision("plain")


@dataclass(frozen=True, slots=True)
class Proposal:
    """A sequence's drafted tree.

    Attributes:
        tree: The tree; its root is the sequence's last token.
        decision: What was decided; None for a request that names its tree.
        chances: By node, the calibrated chance that a child of it is accepted; 0: it has none, or a forced one.
        continuation: How the text may go on, drafted or not; None: nothing is known.
        shape: The largest tree that the model grows below the root, in place of `tree`; None: `tree` is all.
        growth: How the model grew the tree on the host; None: it did not.
    """

    tree: Tree
    decision: Decision | None = None
    chances: Sequence[float] = ()
    continuation: Continuation | None = None
    shape: TreeSpec | None = None
    growth: Growth | None = None

    @property
    def nodes(self) -> int:
        """Nodes of the tree, its root included; the maximum if it is still to grow."""
        return 1 + self.shape.nodes if self.shape else len(self.tree)
