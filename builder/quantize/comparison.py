"""Compares precisions by quality, size and the time of a step, and chooses the best by one of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from specbuild.builder.config.quantize_options import BEST_KL, BEST_SIZE
from specbuild.builder.frontend.layer_by_layer import LayeredModel
from specbuild.runtime.errors import ExecutionError

from .calibrate import NumbersByName
from .linears import simulated
from .quality import Before, moved

EXACT = "fp32"
PLAIN_STEP = "1"  # nodes of the step by which speeds are compared
Steps = dict[str, float]  # milliseconds by number of nodes
Time = Callable[[Mapping[str, NumbersByName]], dict[str, Steps]]  # times the steps of all precisions in turns


@dataclass(frozen=True, slots=True)
class Compared:
    """One precision's measurements.

    Attributes:
        precision: Its name.
        bytes: Size of the weights.
        kl: Divergence from float32 in nats per token, by kind of text.
        top1: Fraction of tokens after which the most likely token is the same, by kind of text.
        perplexity: Perplexity of the held-out texts; None if they are too short.
        steps: The time of a step.
    """

    precision: str
    bytes: int
    kl: dict[str, float]
    top1: dict[str, float]
    perplexity: float | None
    steps: Steps

    @property
    def worst(self) -> float:
        """The divergence in nats per token on the kind of text where it is largest."""
        return max(self.kl.values())


def compare(
    model: LayeredModel,
    candidates: Mapping[str, NumbersByName],
    sizes: Mapping[str, int],
    before: Mapping[str, Before],
    time: Time,
) -> list[Compared]:
    """Return a row for each candidate, the smallest first.

    Args:
        model: The float32 model.
        candidates: The quantized weights of each precision; those of EXACT are only the ones given by name.
        sizes: Bytes of the weights in each precision.
        before: What the float32 model computes, by kind of text; the perplexity is the first kind's.
        time: Times the steps of all candidates.
    """
    steps, rows = time(candidates), list[Compared]()
    for precision, found in candidates.items():
        with simulated(model, found) as changed:
            of = {kind: moved(each, changed.logits(each.texts)) for kind, each in before.items()}
        first = next(iter(of.values()))
        kl, top1 = ({kind: each[name] for kind, each in of.items()} for name in ("kl_nats_per_token", "top1_agreement"))
        measured = first["perplexity"][1], steps[precision]
        rows.append(Compared(precision, sizes[precision], kl, top1, *measured))
    return sorted(rows, key=lambda row: row.bytes)


def best(rows: list[Compared], wanted: str, max_kl: float) -> Compared:
    """Return the best row: the smallest or the one with the fastest step within `max_kl`, or the one of least KL.

    For BEST_KL only rows with a faster step than float32 count, or float32 if there are none.

    Raises:
        ExecutionError: Even float32 moves by more than `max_kl`, for weights given by name are narrow in it, too.
    """
    exact = next(row for row in rows if row.precision == EXACT)
    if wanted == BEST_KL:
        faster = [row for row in rows if row is not exact and row.steps[PLAIN_STEP] < exact.steps[PLAIN_STEP]]
        return min(faster or [exact], key=lambda row: (row.worst, row.bytes))
    holding = [row for row in rows if row.worst <= max_kl]
    if not holding:
        raise ExecutionError(
            f"the weights given by --tensor-type alone move the target by {exact.worst:.2g} nats a token, more than "
            f"--max-kl {max_kl:g}: nothing was written, give them a wider precision, or allow more"
        )
    return min(holding, key=lambda row: row.bytes if wanted == BEST_SIZE else row.steps[PLAIN_STEP])


def to_dict(rows: list[Compared], wanted: str, chosen: Compared) -> dict[str, Any]:
    """Return the comparison as report.json has it."""
    return {"by": wanted, "chosen": chosen.precision, "precisions": [asdict(row) for row in rows]}
