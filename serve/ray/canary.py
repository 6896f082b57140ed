"""A canary over replicas: one judge, a deployment of its own, draws for all of them and weighs what they report.

A session that moves from replica to replica keeps its arm and counts once, which judges of each replica could not see.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from specbuild.runtime import Bundle, LoadOptions, Manifest
from specbuild.serve.canary.canary import Arms
from specbuild.serve.canary.comparison import arms_of
from specbuild.serve.canary.routes import CanaryMetrics, obeyed
from specbuild.serve.canary.verdicts import Judge
from specbuild.serve.errors import ApiError
from specbuild.serve.options import ServeOptions
from specbuild.serve.request.fields import Sampling
from specbuild.serve.request.generation import Draw, Generation
from specbuild.serve.request.models import Models, ServedModel
from specbuild.serve.request_outcome import observed
from specbuild.serve.supervision import together
from specbuild.serve.telemetry.logs import RequestLog, error_of

from . import remote_bundle

SECONDS = 2.0  # that a request waits for its arm; then it runs as it asks, and so do the next until the judge answers
_ASK_AGAIN = 1.0  # seconds between two questions whether the judge is back
_QUEUED = 4096  # requests that wait to be reported; more are dropped
Given = tuple[list[tuple[tuple[str, ...], remote_bundle.Source]], ServeOptions, LoadOptions]


_UNANSWERED = (RayError, RayServeException, TimeoutError, asyncio.TimeoutError)


@dataclass(frozen=True, slots=True)
class _Bundle:
    """A bundle that others serve."""

    names: tuple[str, ...]
    manifest: Manifest

    @property
    def name(self) -> str:
        return self.names[0]


class JudgeReplica:
    """The judge, as the only replica of its deployment; replicas and front call it."""

    async def __init__(self, given: Given) -> None:  # type: ignore[misc]
        sources, options, _ = given
        log = RequestLog(sys.stderr, options.log_requests)
        asked = options.canary
        assert asked
        bundles = [_Bundle(names, Bundle.open(remote_bundle.local(source)).manifest) for names, source in sources]
        baseline, _ = arms_of(bundles, asked)
        self._judge = Judge(baseline.name, asked, log)
        self._metrics = CollectorRegistry()
        self._metrics.register(CanaryMetrics(self._judge))
        self._running = asyncio.ensure_future(self._judge.run())

    async def draw(self, key: str | None) -> tuple[bool, Draw | None]:
        """See `Judge.draw`."""
        return self._judge.draw(key)

    async def note(self, draw: Draw, values: dict[str, float] | None) -> None:
        """See `Judge.note`."""
        self._judge.note(draw, values)

    async def ask(self, order: str | None) -> tuple[int, Any]:
        """Return the status and body of `GET /canary`, or of the route of an order."""
        try:
            return 200, obeyed(self._judge, order) if order else self._judge.view()
        except ApiError as error:
            return error.status, error.body()

    async def metrics(self) -> str:
        """Return the judge's metrics as Prometheus' text."""
        return generate_latest(self._metrics).decode()

    async def __del__(self) -> None:
        """Save the state."""
        if running := getattr(self, "_running", None):
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


class ReplicaCanary:
    """A `Watcher` whose judge is elsewhere: one replica's side of a canary."""

    def __init__(
        self, models: Models, options: ServeOptions, log: RequestLog, judge: Any, seconds: float = SECONDS
    ) -> None:
        """Find both arms; see `Arms`. `judge`: Ray's handle of the `JudgeReplica`, which has `seconds` to draw."""
        assert options.canary
        self._arms = Arms(models, options.canary, len(options.api_keys))
        self._judge, self._log, self._seconds = judge, log, seconds
        self._told = asyncio.Queue[tuple[Draw, Any]](_QUEUED)
        self._silent = asyncio.Event()  # set while the judge does not answer

    async def arm(
        self, served: ServedModel, body: Sampling, tenant: str | None
    ) -> tuple[ServedModel, str | None, Draw | None]:
        """Return the model for a request, its speculation and its draw; without a judge it is the baseline's."""
        if self._silent.is_set() or not self._arms.concerns(served, body):
            return served, None, None
        try:
            candidate, draw = await self._asked("draw", self._arms.key(body, tenant))
        except _UNANSWERED as error:
            self._silent.set()
            self._log.event("warning", "the canary's judge does not answer", **error_of(error))
            return served, None, None
        return *self._arms.placed(body, candidate), draw

    def ended(self, generation: Generation) -> None:
        """See `Watcher`; `run` tells the judge, for what a request asks of Ray ends with the request."""
        if generation.draw and not self._told.full():
            self._told.put_nowait((generation.draw, observed(generation)))

    async def _asked(self, what: str, *given: Any) -> Any:
        """Return what the judge answers; raises one of _UNANSWERED."""
        return await asyncio.wait_for(getattr(self._judge, what).remote(*given), self._seconds)

    async def run(self) -> None:
        """See `Watcher`; tells the judge of requests that have ended."""
        await together(self._telling(), self._waiting())

    async def _waiting(self) -> None:
        """Ask a judge that was silent until it answers, so that no request waits for it."""
        while True:
            await self._silent.wait()
            await asyncio.sleep(_ASK_AGAIN)
            with suppress(*_UNANSWERED):
                await self._asked("ask", None)
                self._silent.clear()
                self._log.event("info", "the canary's judge answers again")

    async def _telling(self) -> None:
        while True:
            draw, values = await self._told.get()
            try:
                await self._asked("note", draw, values)
            except _UNANSWERED as error:
                self._log.event("warning", "the canary's judge was not told of a request", **error_of(error))
