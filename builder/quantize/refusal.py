"""A refusal that helps: before minutes are spent, with what costs most, and the narrowest precision that would do."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedModel

from specbuild.runtime.errors import ExecutionError, OptionError

from .calibrate import Found
from .linears import simulated
from .quality import Before
from .sensitivity import distance, least_alike
from .texts import Texts

WIDER = ("int8", "int8:wide")  # what may do instead, the narrowest first
GLANCE, GLANCED = 128, 6  # tokens of a text that is looked at first, and texts that are calibrated on for that
Numbers = Callable[[str], Found]  # a model's, in a precision


def glance(model: PreTrainedModel, texts: Texts) -> Before:
    """What a model computes of one held-out text in float32, nothing of it greedily."""
    text = max(texts.held_out, key=len)[:GLANCE]
    return Before.logits_of(model, [text])


def check_cost(
    model: PreTrainedModel,
    found: Found,
    before: Before,
    precision: str,
    max_kl: float,
    numbers: Numbers,
    factor: float = 1.0,
) -> None:
    """Raise ExecutionError where numbers cost more than `factor` times `max_kl` nats a token, as they are simulated.

    `numbers`: the model's in another precision, to say which would do.
    """
    with simulated(model, found):
        cost = distance(model, before)
    if cost <= factor * max_kl:
        return
    worst = ", ".join(name for name, _ in least_alike(model, found, before)[:3])
    told = f"{precision} moves the target by {cost:.2g} nats a token, more than --max-kl {max_kl:g}, most by {worst}"
    for wider in (each for each in WIDER if each != precision):
        try:
            found = numbers(wider)
        except OptionError:  # not for this backend
            continue
        with simulated(model, found):
            instead = distance(model, before)
        if instead <= max_kl:
            raise ExecutionError(
                f"{told}: nothing was written, use --precision {wider}, which moves it by {instead:.2g}, or allow more"
            )
    raise ExecutionError(f"{told}: nothing was written, use --precision fp32, or allow more")
