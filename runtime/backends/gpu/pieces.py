"""Split a prefill chunk into steps of one slot, each of one of the lengths that a model has."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import replace

from specbuild.runtime.backends.executor import StepInput
from specbuild.runtime.errors import ExecutionError

from .model import Model


def pieces(step_input: StepInput, model: Model, by_row: bool) -> Iterator[tuple[StepInput, int]]:
    """Yield a chunk's pieces with the node counts of their steps; several if the rows of one step do not fit.

    Args:
        step_input: The chunk.
        model: The model that runs it.
        by_row: Whether a step's length must depend only on the rows of its tokens, wherever the prefill began.

    Raises:
        ExecutionError: If the padding of the shortest step does not fit the cache.
    """
    at, total = 0, len(step_input.tokens)
    while at < total:
        start, count = step_input.start + at, total - at
        nodes, size = _by_row(model, start, count) if by_row else _shortest(model, start, count)
        end = at + size
        yield (
            replace(
                step_input,
                start=start,
                committed=start if at else step_input.committed,
                tokens=step_input.tokens[at:end],
                positions=step_input.positions[at:end],
                logits=step_input.logits if end == total else 0,
                hidden=None if step_input.hidden is None else step_input.hidden[at:end],
            ),
            nodes,
        )
        at = end


def _shortest(model: Model, start: int, count: int) -> tuple[int, int]:
    """Return the node count of the shortest step for the tokens that are left, and how many of them it reads."""
    lengths = model.lengths
    nodes = lengths[bisect_left(lengths, count)]
    if model.tensors.tree is None and start + nodes > model.spec.capacity:  # TreeAttention writes no padding
        if count < lengths[0]:
            raise ExecutionError(f"{count} nodes from row {start} on do not fit the {model.spec.name}'s padding")
        nodes = lengths[bisect_right(lengths, count) - 1]
    return nodes, min(nodes, count)


def _by_row(model: Model, start: int, count: int) -> tuple[int, int]:
    """Like `_shortest`, by row: one short step reads the first rows, several the last ones, long steps the others."""
    short, long = model.buckets[-1], model.lengths[-1]
    last = model.spec.capacity - long + 1  # the first row where a long step would not fit
    if short <= start < last:
        return long, min(long, last - start, count)
    return short, min(short - start if start < short else short, count)
