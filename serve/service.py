"""The models, options, watchers and threads that all routes of a server share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from specbuild.serve.canary.canary import Canary
from specbuild.serve.request.admission import Admission
from specbuild.serve.request.generation import Watcher, Workers
from specbuild.serve.request.grammars import GrammarCompiler
from specbuild.serve.request.models import Models
from specbuild.serve.request.rate_limits import RateLimits
from specbuild.serve.shadow.shadow_check import Oracle
from specbuild.serve.supervision import Supervisor
from specbuild.serve.telemetry.traces import Traces

from . import limits
from .metrics import Metrics
from .options import ServeOptions

_PREPARING = 2  # threads
_TEXTS = 64  # requests of /tokenize and the like at once; more are refused


@dataclass(frozen=True, slots=True)
class Service:
    """Everything that the routes need: models, options, metrics, traces, watchers and thread pools."""

    models: Models
    options: ServeOptions
    metrics: Metrics
    traces: Traces = field(default_factory=Traces)
    oracle: Oracle | None = None
    canary: Canary | None = None
    watchers: Sequence[Watcher] = ()  # including oracle and canary
    rates: RateLimits = field(default_factory=RateLimits)
    supervisor: Supervisor | None = None  # of the watchers; None: nothing runs them
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(_PREPARING, "specbuild-prepare"))
    text_pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "specbuild-text"))
    text_admission: Admission = field(default_factory=lambda: Admission(1, _TEXTS - 1))
    grammars: GrammarCompiler = field(default_factory=GrammarCompiler)
    first_event_seconds: float = limits.FIRST_EVENT_SECONDS
    ping_seconds: float = limits.PING_SECONDS

    def drain(self) -> None:
        """Refuse new requests and report not ready from now on."""
        for model in self.models.all:
            model.admission.draining = True

    @property
    def refuses_unknown(self) -> bool:
        """Return whether requests with unknown fields are refused."""
        return self.options.extra_fields == "refuse"

    async def tokenizing(self, work: Callable[[], Any]) -> Any:
        """Run a function for a request that decodes no text, such as `/tokenize`; raises ApiError 429."""
        with self.text_admission.room(1) as ticket:
            found = await asyncio.get_running_loop().run_in_executor(self.text_pool, work)
            ticket.started()
            return found

    @property
    def workers(self) -> Workers:
        """The threads, grammars and metrics of requests."""
        return Workers(self.pool, self.grammars, self.metrics)

    @property
    def requests(self) -> int:
        """Number of requests in progress in all models."""
        return sum(model.admission.requests for model in self.models.all)
