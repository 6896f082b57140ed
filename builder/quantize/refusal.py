"""Refuses a precision that costs too much, early if possible, and names a precision that would do."""

from __future__ import annotations

from collections.abc import Callable

from specbuild.builder.frontend.layer_by_layer import LayeredModel
from specbuild.runtime.errors import ExecutionError

from .calibrate import NumbersByName
from .quality import Before
from .sensitivity import distance, least_alike
from .texts import Texts

WIDER = "int8"  # the precision to try instead
GLANCE, GLANCED = 128, 6  # `check_early`: tokens per text, and calibration texts
Numbers = Callable[[str], NumbersByName]  # returns a model's quantized weights in a precision


def glance(model: LayeredModel, texts: Texts) -> Before:
    """Compute a model's float32 logits of the beginning of the longest held-out text, for a quick check."""
    text = max(texts.held_out, key=len)[:GLANCE]
    return Before([text], model.logits([text]))


def check_cost(
    model: LayeredModel,
    found: NumbersByName,
    before: Before,
    precision: str,
    max_kl: float,
    numbers: Numbers,
    factor: float = 1.0,
) -> None:
    """Raise ExecutionError if quantized weights, simulated, cost more than `factor * max_kl` nats per token.

    The error names the layers whose outputs change most, and says whether WIDER would do.

    Args:
        model: The float32 target.
        found: Its quantized weights, by name.
        before: Its results in float32.
        precision: The precision of `found`.
        max_kl: The bound in nats per token.
        numbers: Returns the target's quantized weights in another precision.
        factor: How many times `max_kl` is allowed here.
    """
    cost = distance(model, before, found)
    if cost <= factor * max_kl:
        return
    worst = ", ".join(least_alike(model, found, before)[:3])
    message = f"{precision} moves the target by {cost:.2g} nats a token, more than --max-kl {max_kl:g}, most by {worst}"
    instead = float("inf") if precision == WIDER else distance(model, before, numbers(WIDER))
    if instead <= max_kl:
        message += f": nothing was written, use --precision {WIDER}, which moves it by {instead:.2g}, or allow more"
    else:
        message += ": nothing was written, use --precision fp32, or allow more"
    raise ExecutionError(message)
