"""Limits that an operator sets on drafting, whatever requests ask for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from specbuild.runtime.errors import OptionError, shown

_Positive = Annotated[int, Meta(ge=1)]
Schedule = tuple[tuple[int, int, int], ...]  # (first batch size, last batch size, nodes that a sequence may draft)


@dataclass(frozen=True, slots=True)
class Limits:
    """An operator's limits on drafting; validated on construction, which raises OptionError.

    Limits given to `Engine.load` also refuse requests that name a larger tree. Any thread may replace them through
    `Engine.limits`, from the next round on: with at most as many nodes as at loading (None: as many), and without
    refusing any request. No text depends on limits.

    Attributes:
        max_draft_tokens: Maximum nodes of a sequence's draft tree, the root not counted; 0 is plain decoding; None
            allows as many as the bundle verifies.
        min_expected_speedup: Speedup over plain decoding, 1 to 1000, that a round of a request with speculation "auto"
            must promise to draft at all; above 1 it needs a tuned bundle.
        num_speculative_tokens_per_batch_size: Maximum nodes by how many sequences draft together, in one of vLLM's two
            forms, {"1-4": 8, "5-16": 2} or [[1, 4, 8], [5, 16, 2]], or JSON of either. Both ends are included. A batch
            size between two ranges, or past the last, takes the value of the range before it. It is stored as triples
            (first, last, nodes) in ascending order.
    """

    max_draft_tokens: int | None = None
    min_expected_speedup: float = 1.0
    num_speculative_tokens_per_batch_size: Any = ()

    def __post_init__(self) -> None:
        nodes, speedup = self.max_draft_tokens, self.min_expected_speedup
        if nodes is not None and (type(nodes) is not int or nodes < 0):
            raise OptionError(f"max_draft_tokens must be a whole number from 0 on, not {shown(nodes)}")
        if isinstance(speedup, bool) or not isinstance(speedup, int | float) or not 1 <= speedup <= 1000:
            raise OptionError(f"min_expected_speedup must be a number from 1 to 1000, not {shown(speedup)}")
        schedule = _schedule(self.num_speculative_tokens_per_batch_size)
        object.__setattr__(self, "num_speculative_tokens_per_batch_size", schedule)

    def max_nodes(self, batch: int, nodes: int) -> int:
        """Return how many draft nodes a sequence may have.

        Args:
            batch: Number of sequences that draft in the round, this one included.
            nodes: Nodes that the sequence would draft without limits.

        Returns:
            At most `nodes` nodes, the root not counted.
        """
        schedule: Schedule = self.num_speculative_tokens_per_batch_size
        limits = [limit for first, _, limit in schedule if first <= batch][-1:]
        if self.max_draft_tokens is not None:
            limits.append(self.max_draft_tokens)
        return min([nodes, *limits])


def _schedule(value: Any) -> Schedule:
    """Return either form as triples in ascending order; raise OptionError for anything else."""
    try:
        form = json.loads(value) if isinstance(value, str) else value
        if isinstance(form, Mapping):
            form = [[*map(int, str(sizes).split("-")), nodes] for sizes, nodes in form.items()]
        ranges = sorted(msgspec.convert(form, list[tuple[_Positive, _Positive, Annotated[int, Meta(ge=0)]]]))
        if any(first > last for first, last, _ in ranges) or any(a[1] >= b[0] for a, b in pairwise(ranges)):
            raise ValueError
    except (ValueError, TypeError, RecursionError):
        raise OptionError(
            f"num_speculative_tokens_per_batch_size is {shown(value)}: give ranges of batch sizes from 1 that do not "
            'overlap, and whole numbers of tokens, like {"1-4": 8, "5-16": 2} or [[1, 4, 8], [5, 16, 2]]'
        ) from None
    return tuple(ranges)


NO_LIMITS = Limits()
