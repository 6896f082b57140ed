"""Estimates how long a build takes, from its checkpoints' headers and from how fast this machine multiplies."""

from __future__ import annotations

import time
from functools import cache

import torch

from .config.build_config import BuildConfig
from .config.quantize_options import chooses
from .frontend.checkpoint import Checkpoint
from .frontend.draft_head import HeadCheckpoint
from .quantize.assignment import assign
from .quantize.linears import Names
from .quantize.texts import LENGTH

# Measured on two quiet cores of an AMD EPYC, with models of 0.1, 0.5 and 1.5 billion parameters.
SPEED = 120e9  # operations a second of a product
PROCESS, LAYER = 15.0, 0.3  # seconds to start and end; to trace and lower a layer
PARAMETER = 46e-9  # seconds to write a parameter, and to run it in the check
QUANTIZED, COMPARED = 90e-9, 36.0  # seconds to quantize a parameter and measure its cost; beside that, for a model
SOLVED, PER_TOKEN = 200e-9, 50e-12  # seconds to calibrate a parameter, and more for each token of the texts
CANDIDATES = 3  # quantized models where the build chooses
SIZE, TRIES = 512, 30  # of the product that is timed


@cache
def slowness() -> float:
    """Return how many times as long as measured a product takes here, at its fastest of TRIES."""
    numbers, times = torch.ones(SIZE, SIZE), list[float]()
    for _ in range(TRIES):
        started = time.perf_counter()
        numbers @ numbers
        times.append(time.perf_counter() - started)
    return min(times) * SPEED / (2 * SIZE**3)


def building_seconds(
    config: BuildConfig, name: str, model: Checkpoint | HeadCheckpoint, layers: int, names: Names | None
) -> float | None:
    """Return the seconds to build one model beside those of a process; None if an engine is compiled, which varies.

    Args:
        config: The build's options.
        name: "target" or "draft".
        model: The model's checkpoint.
        layers: How many layers it has.
        names: Its weights that can be quantized; None for a head.
    """
    if config.descriptor.compiles:
        return None
    seconds, precision = LAYER * layers + PARAMETER * model.parameters, config.precision_of(name)
    if not config.quantizes or names is None:
        return slowness() * seconds
    schemes = assign(config.quantize, name, precision, config.backend, names).values()
    tokens = LENGTH * config.quantize.calib_size
    calibrated = chooses(precision) or any(scheme.calibrated for scheme in schemes)
    each = QUANTIZED + (SOLVED + PER_TOKEN * tokens) * calibrated
    return slowness() * (seconds + (COMPARED + each * model.parameters) * (CANDIDATES if chooses(precision) else 1))
