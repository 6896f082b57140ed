"""Supervision of what runs beside the requests: it is started again where it fails, and health and metrics say so."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from specbuild.serve.request.generation import Watcher
from specbuild.serve.telemetry.logs import RequestLog, error_of

FIRST, LAST = 1.0, 60.0  # seconds until a watcher that failed is started again: at first, and after many failures


async def together(*works: Coroutine[Any, Any, None]) -> None:
    """Run coroutines until the first fails or all have ended; none of them outlives the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Supervisor(Collector):
    """Runs watchers, each under the name of its class."""

    def __init__(self, watchers: Sequence[Watcher], log: RequestLog, first: float = FIRST) -> None:
        self._watchers = {type(each).__name__.lower(): each for each in watchers}
        self._log, self._first = log, first
        self.failures = dict.fromkeys(self._watchers, 0)
        self.states = dict.fromkeys(self._watchers, "running")  # or "failed", until it is started again

    async def run(self) -> None:
        """Run every watcher until cancelled."""
        await together(*(self._keep(name, watcher) for name, watcher in self._watchers.items()))

    async def _keep(self, name: str, watcher: Watcher) -> None:
        wait = self._first
        while True:
            try:
                self.states[name] = "running"
                return await watcher.run()
            except Exception as error:
                self.states[name], self.failures[name] = "failed", self.failures[name] + 1
                self._log.event("error", f"{name} ended by a bug, and is started again: report it", **error_of(error))
            await asyncio.sleep(wait)
            wait = min(2 * wait, LAST)

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        up = GaugeMetricFamily("specbuild:watcher_up", "1 while it runs.", labels=("watcher",))
        told = "Times that it ended by a bug."
        failures = CounterMetricFamily("specbuild:watcher_failures", told, labels=("watcher",))
        for name, count in self.failures.items():
            up.add_metric([name], float(self.states[name] == "running"))
            failures.add_metric([name], count)
        yield from (up, failures)
