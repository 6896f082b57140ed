"""Precisions next to each other: quality, bytes and a step's time of each; and the best by one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedModel

from specbuild.builder.config.quantize_options import BEST_KL, BEST_SIZE
from specbuild.builder.frontend.reference import text_logits

from .calibrate import Found
from .linears import simulated
from .quality import Before, moved

EXACT = "fp32"
PLAIN_STEP = "2"  # nodes of a step of plain decoding, as exactness classes want it
Steps = dict[str, float]  # milliseconds by nodes
Time = Callable[[Mapping[str, Found]], dict[str, Steps]]  # of each precision's steps, in turns


@dataclass(frozen=True, slots=True)
class Compared:
    """A precision: its weights' bytes; by kind of text nats a token from float32, and how often the first choice stays.

    `first_divergence`: after how many tokens greedy texts part, None where they do not.
    """

    precision: str
    bytes: int
    kl: dict[str, float]
    top1: dict[str, float]
    perplexity: float | None
    first_divergence: list[int | None]
    steps: Steps

    @property
    def worst(self) -> float:
        """Nats a token on the texts that it costs most."""
        return max(self.kl.values())


def compare(
    model: PreTrainedModel,
    candidates: Mapping[str, Found],
    sizes: Mapping[str, int],
    before: Mapping[str, Before],
    time: Time,
) -> list[Compared]:
    """A row for each candidate, of which EXACT has no numbers, the narrowest first. `before`: by kind of text."""
    steps, rows = time(candidates), list[Compared]()
    for precision, found in candidates.items():
        with simulated(model, found):
            of = {kind: moved(each, lambda text: text_logits(model, text)) for kind, each in before.items()}
        first = next(iter(of.values()))
        kl, top1 = ({kind: each[name] for kind, each in of.items()} for name in ("kl_nats_per_token", "top1_agreement"))
        measured = first["perplexity"][1], first["first_divergence"], steps[precision]
        rows.append(Compared(precision, sizes[precision], kl, top1, *measured))
    return sorted(rows, key=lambda row: row.bytes)


def best(rows: list[Compared], wanted: str, max_kl: float) -> Compared:
    """The least bytes, or the fastest step, within `max_kl`; or the least KL of what has a faster step than float32."""
    exact = next(row for row in rows if row.precision == EXACT)
    if wanted == BEST_KL:
        faster = [row for row in rows if row is not exact and row.steps[PLAIN_STEP] < exact.steps[PLAIN_STEP]]
        return min(faster or [exact], key=lambda row: (row.worst, row.bytes))
    holding = [row for row in rows if row.worst <= max_kl]  # float32 does
    return min(holding, key=lambda row: row.bytes if wanted == BEST_SIZE else row.steps[PLAIN_STEP])


def to_dict(rows: list[Compared], wanted: str, chosen: Compared) -> dict[str, Any]:
    """For report.json."""
    return {"by": wanted, "chosen": chosen.precision, "precisions": [asdict(row) for row in rows]}
