"""The result of a round for one sequence, whichever loop ran it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.proposal import Proposal


@dataclass(frozen=True, slots=True)
class RoundResult:
    """A sequence's part of a round.

    Attributes:
        sequence: The sequence.
        proposal: What it drafted.
        drafted: Nodes of the tree, the root not counted.
        path: The accepted nodes, the root first.
        tokens: The target's choice after each of them.
        fault: A kernel's fault; 0: none.
        rows: The path's rows of logits in a device's step, while they are there.
    """

    sequence: Sequence
    proposal: Proposal
    drafted: int
    path: Seq[int]
    tokens: Seq[int]
    fault: int = 0
    rows: Seq[int] = ()
