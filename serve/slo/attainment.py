"""Attainment: the share of the latest requests that keep to each latency objective, as a metric for alerts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from specbuild.runtime import RequestMetrics
from specbuild.serve.request.generation import Generation
from specbuild.serve.request.models import Models

from .objectives import Objective

COUNT, SECONDS = 512, 30.0  # maximum number and age of the requests that are looked at


class Attainment(Collector):
    """A `Watcher` of every model's requests; `clock`: the engines' clock."""

    def __init__(
        self, models: Models, objectives: Sequence[Objective], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._objectives, self._clock = objectives, clock
        self._latest = {model.name: deque[RequestMetrics](maxlen=COUNT) for model in models.all}

    def ended(self, generation: Generation) -> None:
        """See `Watcher`; samples that reached their first token count."""
        own = (result.metrics for result in generation.results.values())
        self._latest[generation.served.name].extend(each for each in own if each and each.first_token is not None)

    async def run(self) -> None:
        """See `Watcher`; there is nothing to do."""

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """See prometheus_client; an objective without requests is kept."""
        told, labels = "The share of the latest requests that kept to an objective.", ("model_name", "objective")
        attained = GaugeMetricFamily("specbuild:slo_attainment", told, labels=labels)
        oldest = self._clock() - SECONDS
        for name, latest in self._latest.items():
            recent = [each for each in latest.copy() if (each.finished or 0.0) >= oldest]
            for each in self._objectives:
                attained.add_metric([name, each.name], _share(each, recent))
        yield attained


def _share(objective: Objective, recent: Sequence[RequestMetrics]) -> float:
    """Return the share of requests that keep to an objective; a text of one token has no time per token."""
    measured = objective.measured
    timed = [each for each in recent if measured != "tpot" or each.num_output_tokens > 1]
    kept = sum(getattr(each, measured) <= objective.seconds for each in timed)
    return kept / len(timed) if timed else 1.0
