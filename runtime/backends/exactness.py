"""Exactness classes: shapes of steps whose logits are bitwise those of plain decoding on one machine.

Libraries use different kernels for one row of a matrix product than for several, and these sum in different orders.
Where a product's inputs are quantized, a difference in the last bit of a sum can change a logit visibly. Within a class
the logits depend neither on how many tokens a step has, nor on what else is in it, nor on which steps computed the rows
of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ExactnessClass:
    """The multiples to which the rows of a step are padded so that logits agree bitwise.

    `rows`: the step's nodes, and its wanted logits, are padded to a multiple of it. `sequence_rows`: the attention rows
    of each sequence are padded to a multiple of it, even where the rest of the step is not.

    Padding rows follow all nodes, and no node sees them. In a tree, the nodes before its first side branch are in the
    class. `digest`: the sha256 of a fixed sequence's logits in the class, "" until computed; engines with the same
    class and digest compute the same bits.
    """

    rows: int
    sequence_rows: int
    digest: str = field(default="", compare=False)

    def filled(self, nodes: int) -> int:
        """Return how many rows a step of `nodes` nodes has, padding included."""
        return nodes + -nodes % self.rows


CANDIDATES = tuple(ExactnessClass(*sizes) for sizes in ((1, 1), (1, 2), (2, 2), (4, 4), (8, 8)))  # cheapest first
MAX_ROWS = CANDIDATES[-1].rows
