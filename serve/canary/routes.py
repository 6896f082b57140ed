"""The routes of a canary, and its Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from specbuild.serve.errors import ApiError, faults, json_response

from .canary import Canary, Phase

PREFIX = "specbuild:canary_"
_PHASES: dict[str, Phase] = {"promote": "promoted", "rollback": "rolled back", "restart": "running"}


def routes(canary: Canary) -> APIRouter:
    """Return `GET /canary` and a `POST` for each order."""
    router = APIRouter(responses=faults(statuses=(401, 404, 405, 500)))

    @router.get("/canary", response_model=dict[str, Any])
    async def show_canary() -> Response:
        return json_response(canary.view())

    @router.post("/canary/{order}", response_model=dict[str, Any])
    async def order_canary(order: str) -> Response:
        if order not in _PHASES:
            raise ApiError(404, f"no such order: use {', '.join(_PHASES)}")
        canary.turn(_PHASES[order])
        return json_response(canary.view())

    return router


class CanaryMetrics(Collector):
    """A canary's state, read at each scrape."""

    def __init__(self, canary: Canary) -> None:
        self._canary = canary

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        canary, model = self._canary, self._canary.baseline.name
        weight = GaugeMetricFamily(PREFIX + "weight", "Percent of requests for the candidate.", labels=("model_name",))
        weight.add_metric([model], canary.weight)
        requests = CounterMetricFamily(PREFIX + "requests", "Requests by arm.", labels=("model_name", "arm"))
        for arm, count in zip(("baseline", "candidate"), canary.requests, strict=True):
            requests.add_metric([model, arm], count)
        about = "Texts of the candidate that the baseline decoded again."
        texts = CounterMetricFamily(PREFIX + "texts", about, labels=("model_name", "outcome"))
        for outcome, count in canary.texts.items():
            texts.add_metric([model, outcome], count)
        about = "E-value against the candidate being no worse."
        evidence = GaugeMetricFamily(PREFIX + "evidence", about, labels=("model_name", "metric"))
        for each in canary.trial.evidence():
            evidence.add_metric([model, each.metric], each.harm)
        harmful = GaugeMetricFamily(PREFIX + "harmful", "1 if harm is proven.", labels=("model_name",))
        harmful.add_metric([model], float(canary.trial.harmful))
        yield from (weight, requests, texts, evidence, harmful)
