"""What a canary compares: two ways to serve, and the metrics that they are compared by."""

from __future__ import annotations

import math

from specbuild.measure.trial import Metric
from specbuild.runtime import TreeSpec
from specbuild.runtime.errors import OptionError

from . import ceilings
from .arms import CanaryOptions
from .logs import RequestLog
from .models import Models, ServedModel
from .scoring import Scorer

_ERRORS = 0.02  # a promotion must rule out that the share of failing requests grows by this
_QUALITY = 0.1  # a promotion must rule out that the texts' log-probability falls by this, in nats per token


def metrics_of(options: CanaryOptions, quality: bool) -> list[Metric]:
    """Return the metrics for comparing the arms; `quality`: whether texts are scored.

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
    if quality:
        found.append(Metric("quality", "number", "lower", _QUALITY))
    kept = [metric for metric in found if metric.name not in options.ignore]
    kept += [each.metric for each in ceilings.parse(options.objective)]
    if not any(metric.decides for metric in kept):
        raise OptionError("canary_ignore leaves nothing that a promotion could rest on: ignore fewer metrics")
    return kept


def arms_of(models: Models, options: CanaryOptions) -> tuple[ServedModel, ServedModel]:
    """Return the models of baseline and candidate; raises OptionError."""
    others = [model for model in models.all if options.model not in model.names]
    if options.model is None:
        served = candidate = models.all[0]
    elif len(others) == len(models.all) or not others:
        names = ", ".join(model.name for model in models.all)
        raise OptionError(f"canary model={options.model} is another model that is served, besides one of {names}")
    else:
        served, candidate = others[0], next(model for model in models.all if options.model in model.names)
    for model, way in ((candidate, options.speculation(True)), (served, options.speculation(False))):
        if way not in (None, "auto", "off"):
            TreeSpec.parse(way).check(model.engine.engine.manifest.buckets[-1])
    return served, candidate


def scorer_of(baseline: ServedModel, candidate: ServedModel, log: RequestLog) -> Scorer | None:
    """Return a scorer of both bundles' texts under the baseline; None if their tokenizers differ."""
    manifests = [model.engine.engine.manifest for model in (baseline, candidate)]
    if len({each.files[each.tokenizer].sha256 for each in manifests}) > 1:
        log.event("warning", "the canary's bundles have other tokenizers: quality is not compared")
        return None
    return Scorer(baseline, log, candidate)
