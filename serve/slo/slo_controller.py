"""The SLA guard: compares requests' times with the operator's objectives, and limits drafting accordingly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from specbuild.runtime import Engine, Limits
from specbuild.serve.request.generation import Generation
from specbuild.serve.request.models import Models, ServedModel
from specbuild.serve.telemetry.logs import RequestLog

from .draft_throttle import Steering, Step
from .objectives import Objective, Sample

LOOK_SECONDS = 1.0


class Guard(Collector):
    """A `Watcher` that steers every model. `clock`: the engines' clock; `look_seconds`: between two calls of `look`."""

    def __init__(
        self,
        models: Models,
        objectives: Sequence[Objective],
        registry: CollectorRegistry,
        log: RequestLog,
        clock: Callable[[], float] = time.perf_counter,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self._look_seconds = look_seconds
        self._log, self._models = log, {model.name: model for model in models.all}
        self._limits = {name: model.engine.engine.limits for name, model in self._models.items()}  # set by the operator
        self.steering = {
            name: Steering(objectives, _plain_of(model.engine.engine), _requests_of(model), clock)
            for name, model in self._models.items()
        }
        told = "Times that the SLA guard changed what may be drafted."
        self._changes = Counter("specbuild:slo_changes", told, ("model_name",), registry=registry)
        for name in self._models:
            self._changes.labels(name)
        registry.register(self)

    def ended(self, generation: Generation) -> None:
        """See `Watcher`; samples that reached their first token count."""
        for result in generation.results.values():
            sample = Sample.of(result.metrics) if result.metrics else None
            if sample:
                self.steering[generation.served.name].window.add(sample)

    async def run(self) -> None:
        """Call `look` regularly until cancelled; at the end, whatever ends it, restore the operator's limits."""
        try:
            while True:
                await asyncio.sleep(self._look_seconds)
                self.look()
        finally:
            for name, limits in self._limits.items():
                self._models[name].engine.engine.limits = limits

    def look(self) -> None:
        """Take each model's next step, if any, and log it."""
        for name, steering in self.steering.items():
            if step := steering.look():
                limits = within(self._limits[name], step)
                more = {"slo_level": step.level, "max_draft_tokens": limits.max_draft_tokens}
                self._log.event("info" if step.changed else "warning", step.message, model=name, **more, **step.told)
                if step.changed:
                    self._models[name].engine.engine.limits = limits
                    self._changes.labels(name).inc()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """See prometheus_client."""
        told = "What is left of speculation: 0 is all of it, 3 none."
        level = GaugeMetricFamily("specbuild:slo_level", told, labels=("model_name",))
        told, labels = "The share of the latest requests that kept to an objective.", ("model_name", "objective")
        attained = GaugeMetricFamily("specbuild:slo_attainment", told, labels=labels)
        for name, steering in self.steering.items():
            level.add_metric([name], steering.level)
            for each in steering.objectives:
                attained.add_metric([name, each.name], each.attainment(steering.window.times(each)))
        yield from (level, attained)


def within(limits: Limits, step: Step) -> Limits:
    """Return the operator's limits, with no more nodes than a step allows."""
    if step.nodes is None:
        return limits
    max_nodes = limits.max_draft_tokens
    return replace(limits, max_draft_tokens=step.nodes if max_nodes is None else min(max_nodes, step.nodes))


def _plain_of(engine: Engine) -> Callable[[], float | None]:
    """Return a function that gives the seconds per token of plain decoding with every slot taken.

    It gives None without a timing table.
    """
    timings, slots = engine.timings, engine.batch_size
    return lambda: timings.at(slots).alone * engine.correction if timings else None


def _requests_of(model: ServedModel) -> Callable[[], int]:
    return lambda: model.admission.requests
