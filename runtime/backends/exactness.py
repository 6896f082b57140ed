"""Exactness classes: what makes the logits of all steps bitwise those of plain decoding.

Within a class the logits depend neither on how many tokens a step has, nor on what else is in it, nor on which steps
computed the rows of the cache. On a CPU every step is in the class. On a GPU libraries use other kernels for another
number of rows, which sum in another order: there all steps of a class have one shape.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ExactnessClass:
    """How many rows steps have, in all and of each sequence; 1 and 1: any number.

    Rows that fill a step up follow all nodes, and no node sees them. In a tree, the nodes before its first side branch
    are in the class. `digest`: a sha256 of what the bits depend on; engines with the same class and digest compute the
    same bits.
    """

    rows: int
    sequence_rows: int
    digest: str = field(default="", compare=False)
