"""Exactness classes: the shapes of steps whose logits are bitwise those of plain decoding on one machine.

Libraries have other kernels for one row of a product than for several, and sum in another order then. Where inputs are
rounded, the last bit of such a sum becomes a logit. Within a class it does not matter how many tokens a step has, what
else is in it, or in which steps the rows of the cache were computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ExactnessClass:
    """`rows`: all nodes of a step, and its wanted logits, are a multiple of it.

    `sequence_rows`: attention's rows of each sequence are, where alone they are filled up.

    Rows that fill a step up lie behind all nodes, which do not see them. Of a tree the nodes before its first side
    branch are in the class. `digest`: the sha256 of a text's logits in it, "" until they are computed: engines of one
    class and one digest compute the same bits.
    """

    rows: int
    sequence_rows: int
    digest: str = field(default="", compare=False)

    def filled(self, nodes: int) -> int:
        """How many rows a step of so many nodes has."""
        return nodes + -nodes % self.rows


CANDIDATES = tuple(ExactnessClass(*sizes) for sizes in ((1, 1), (1, 2), (2, 2), (4, 4), (8, 8)))  # cheapest first
MOST_ROWS = CANDIDATES[-1].rows
