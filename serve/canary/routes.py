"""The routes of a canary, and its Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args

from fastapi import APIRouter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from specbuild.measure.trial import Kind
from specbuild.serve.errors import ApiError, ErrorBody, json_response

from .verdicts import Judge, Phase

PREFIX = "specbuild:canary_"
Order = Literal["promote", "rollback", "pause", "resume"]
_PHASES: dict[str, Phase] = {
    "promote": "promoted",
    "rollback": "rolled back",
    "pause": "paused",
    "resume": "running",
}


def routes(canary: Judge) -> APIRouter:
    """Return `GET /canary` and a `POST` for each order."""
    router = APIRouter(responses={status: {"model": ErrorBody} for status in (400, 401, 404, 405, 500)})

    @router.get("/canary", response_model=dict[str, Any])
    async def show_canary() -> Response:
        return json_response(canary.view())

    @router.post("/canary/{order}", response_model=dict[str, Any])
    async def order_canary(order: str) -> Response:
        return json_response(obeyed(canary, order))

    return router


def obeyed(canary: Judge, order: str) -> dict[str, Any]:
    """Carry out an operator's order; return the view afterwards, or raise ApiError."""
    if order not in _PHASES:
        raise ApiError(404, f"no such order: use {', '.join(get_args(Order))}")
    if order in ("pause", "resume") and canary.phase not in ("running", "paused"):
        raise ApiError(400, f"the canary is {canary.phase}: start the server with another --canary-state")
    canary.turn(_PHASES[order])
    return canary.view()


class CanaryMetrics(Collector):
    """A canary's state, read at each scrape."""

    def __init__(self, canary: Judge) -> None:
        self._canary = canary

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        canary, model = self._canary, self._canary.model
        weight = GaugeMetricFamily(PREFIX + "weight", "Percent of requests for the candidate.", labels=("model_name",))
        weight.add_metric([model], canary.weight)
        labels = "model_name", "arm"
        requests = CounterMetricFamily(PREFIX + "requests", "Requests by arm.", labels=labels)
        for arm, count in zip(("baseline", "candidate"), canary.requests, strict=True):
            requests.add_metric([model, arm], count)
        labels = "model_name", "metric"
        told = "E-value against the candidate being no worse."
        evidence = GaugeMetricFamily(PREFIX + "evidence", told, labels=labels)
        for each in canary.trial.evidence():
            evidence.add_metric([model, each.metric], each.harm)
        labels = "model_name", "verdict"
        verdict = GaugeMetricFamily(PREFIX + "verdict", "1 at what follows from the evidence.", labels=labels)
        for kind in get_args(Kind):
            verdict.add_metric([model, kind], kind == (canary.verdict.kind if canary.verdict else "hold"))
        yield from (weight, requests, evidence, verdict)
