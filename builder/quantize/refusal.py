"""Refuses a precision that costs too much, and names one that would do."""

from __future__ import annotations

from collections.abc import Callable

from specbuild.builder.frontend.layer_by_layer import LayeredModel
from specbuild.runtime.errors import ExecutionError

from .calibrate import NumbersByName
from .quality import Before
from .sensitivity import distance, least_alike

WIDER = "int8"  # the precision to try instead
Numbers = Callable[[str], NumbersByName]  # returns a model's quantized weights in a precision


def check_cost(
    model: LayeredModel,
    found: NumbersByName,
    before: Before,
    precision: str,
    max_kl: float,
    numbers: Numbers,
) -> None:
    """Raise ExecutionError if quantized weights, simulated, cost more than `max_kl` nats per token.

    The error names the layers whose outputs change most, and says whether WIDER would do.

    Args:
        model: The float32 target.
        found: Its quantized weights, by name.
        before: Its results in float32.
        precision: The precision of `found`.
        max_kl: The bound in nats per token.
        numbers: Returns the target's quantized weights in another precision.
    """
    cost = distance(model, before, found)
    if cost <= max_kl:
        return
    worst = ", ".join(least_alike(model, found, before)[:3])
    message = f"{precision} moves the target by {cost:.2g} nats a token, more than --max-kl {max_kl:g}, most by {worst}"
    instead = float("inf") if precision == WIDER else distance(model, before, numbers(WIDER))
    if instead <= max_kl:
        message += f": nothing was written, use --precision {WIDER}, which moves it by {instead:.2g}, or allow more"
    else:
        message += ": nothing was written, use --precision fp32, or allow more"
    raise ExecutionError(message)
