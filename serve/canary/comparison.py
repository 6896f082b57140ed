"""The two ways to serve that a canary compares, and the metrics that it compares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, TypeVar

from specbuild.measure.trial import Metric
from specbuild.runtime import Manifest, TreeSpec
from specbuild.runtime.errors import OptionError

from . import canary_objectives as ceilings
from .assignment import CanaryOptions

_ERRORS = 0.02  # a promotion must rule out that the share of failing requests grows by this


class Described(Protocol):
    """A model by its names and its bundle's manifest."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that requests may give it."""
        ...

    @property
    def name(self) -> str:
        """The first of its names."""
        ...

    @property
    def manifest(self) -> Manifest:
        """Its bundle's manifest."""
        ...


Model = TypeVar("Model", bound=Described)


def metrics_of(options: CanaryOptions) -> list[Metric]:
    """Return the metrics for comparing the arms.

    Raises OptionError if every metric that could decide a promotion is ignored.
    """
    slower = math.log1p(options.margin)
    found = [
        Metric("ttft", "time", margin=slower),
        Metric("tpot", "time", margin=slower),
        Metric("e2el", "time"),
        Metric("errors", "share", margin=_ERRORS),
        Metric("cut", "share", "either"),
        Metric("tokens", "count", "either"),
        Metric("invalid", "share"),
    ]
    if options.speculates_in_both:
        found.append(Metric("acceptance", "share", "lower"))
    kept = [metric for metric in found if metric.name not in options.ignore]
    kept += [each.metric for each in ceilings.parse(options.objective)]
    if not any(metric.decides for metric in kept):
        raise OptionError("canary_ignore leaves nothing that a promotion could rest on: ignore fewer metrics")
    return kept


def arms_of(models: Sequence[Model], options: CanaryOptions) -> tuple[Model, Model]:
    """Return the models of baseline and candidate; raises OptionError."""
    others = [model for model in models if options.model not in model.names]
    if options.model is None:
        served = candidate = models[0]
    elif len(others) == len(models) or not others:
        names = ", ".join(model.name for model in models)
        raise OptionError(f"canary model={options.model} is another model that is served, besides one of {names}")
    else:
        served, candidate = others[0], next(model for model in models if options.model in model.names)
    for model, way in ((candidate, options.speculation(True)), (served, options.speculation(False))):
        if way not in (None, "auto", "off"):
            TreeSpec.parse(way).check(model.manifest.buckets[-1])
    return served, candidate
