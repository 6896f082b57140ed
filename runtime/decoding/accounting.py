"""A round's account: the loop's statistics, and each sequence's share of the seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import NamedTuple

from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.cost_model import CostModel

from .loop import Loop


class _State(NamedTuple):
    """A sequence's progress: whether it decodes, and the tokens emitted, prefilled and drafted."""

    decodes: bool
    emitted: int
    prefilled: int
    drafted: int

    @classmethod
    def of(cls, sequence: Sequence) -> _State:
        """Return a sequence's present state."""
        drafted = sequence.metrics.speculative_decoding.num_draft_tokens
        prefilled = sequence.cached - sequence.metrics.num_cached_tokens
        return cls(sequence.decodes, len(sequence.output), prefilled, drafted)

    def since(self, before: _State) -> _State:
        """Return what was added; one that drafted did decode, even if it entered with a cached prompt."""
        _, *added = (now - then for now, then in zip(self, before, strict=True))
        return _State(before.decodes or added[-1] > 0, *added)

    @property
    def rows(self) -> int:
        """Rows in a round's step, of what was added: the last token and drafted ones, or prompt tokens."""
        return 1 + self.drafted if self.decodes else max(self.prefilled, 1)


@contextmanager
def account(loop: Loop, sequences: Seq[Sequence]) -> Iterator[None]:
    """Add a round to a loop's statistics and to its sequences' metrics; a round that raises is not counted."""
    before, states = _clock(loop), [_State.of(s) for s in sequences]
    yield
    total, draft, verify = (now - then for now, then in zip(_clock(loop), before, strict=True))
    parts = [_State.of(s).since(was) for s, was in zip(sequences, states, strict=True)]
    emitted = sum(part.emitted for part in parts)
    loop.tally.add(rounds=1, emitted=emitted, total=total, draft=draft, verify=verify)
    _bill(loop.cost, total, sequences, parts)


def _bill(cost: CostModel | None, total: float, sequences: Seq[Sequence], parts: Seq[_State]) -> None:
    """Divide the round's seconds among the sequences by their rows, and add what plain decoding would have taken.

    A round without drafts, and prefill, take the same in plain decoding. In a round where others prefill, one row of a
    sequence is a plain token, and each further token that it emitted would have been a round of its own.
    """
    second, decoding = total / max(sum(part.rows for part in parts), 1), sum(part.decodes for part in parts)
    drafts, token = any(part.drafted for part in parts), math.nan  # without a timing table nobody knows
    if drafts and cost:
        sampled = any(s.params.temperature > 0 for s in sequences)
        token = cost.of_round(decoding, sampled).plain / decoding
    for sequence, part in zip(sequences, parts, strict=True):
        plain = busy = second * part.rows
        if drafts and part.decodes:
            all_decode = decoding == len(parts)
            plain = part.emitted * token if all_decode else second + max(part.emitted - 1, 0) * token
        sequence.metrics.bill(busy, plain)


def _clock(loop: Loop) -> tuple[float, float, float]:
    """Return the time now, and the draft's and the target's seconds so far."""
    draft = loop.draft_executor
    return time.perf_counter(), draft.seconds if draft else 0.0, loop.target.seconds
