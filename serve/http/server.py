"""The life of a server: load, listen, serve, drain, end; it also ends if a worker dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from specbuild.runtime import AsyncEngine, Bundle, Engine, LoadOptions
from specbuild.runtime.bundle.memory_plan import plan
from specbuild.runtime.errors import OptionError, shown
from specbuild.serve import limits
from specbuild.serve.canary.canary import Canary
from specbuild.serve.canary.routes import CanaryMetrics
from specbuild.serve.cost.ledger import Ledger
from specbuild.serve.metrics import Metrics
from specbuild.serve.options import ServeOptions
from specbuild.serve.request.admission import Admission
from specbuild.serve.request.generation import Watcher
from specbuild.serve.request.models import Models, ServedModel
from specbuild.serve.request.parameters import COMPLETION_TOKENS, DEFAULTS, defaults_of
from specbuild.serve.request.rate_limits import RateLimits
from specbuild.serve.service import Service
from specbuild.serve.shadow.shadow_check import Oracle
from specbuild.serve.supervision import Supervisor
from specbuild.serve.telemetry.logs import RequestLog
from specbuild.serve.text_sample import TextSample

from . import listener
from .app import make_app, make_operators_app
from .connection import Connection
from .warm_up import warm_up

_LOOK = 0.1  # seconds between checks of the workers, and of what a drain waits for
_GRACE = 5  # seconds for sending responses whose texts have ended
Place = tuple[ServeOptions, socket.socket]
Named = Sequence[tuple[tuple[str, ...], Path]]


def run(named: Named, options: ServeOptions, load: LoadOptions, log: RequestLog) -> int:
    """Serve bundles until a signal ends it; return the exit status, 1 if a worker died.

    Args:
        named: Names and folder of each bundle.
        options: How the server listens and answers.
        load: How bundles are loaded.
        log: The server's log.

    Raises:
        OptionError: If an option is wrong; before it serves.
        BundleError: If a bundle is wrong; before it serves.
        ExecutionError: If a bundle's models cannot be loaded; before it serves.
    """
    _raise_open_files()
    with contextlib.ExitStack() as closing:
        places = [(each, listener.listen(each)) for each in (options, options.operators) if each]
        for each, listening in places:
            closing.callback(listener.close, listening, each)
        with _loaded(named, options, load, log) as service:
            return asyncio.run(_Life(service, log, places).run())


def _raise_open_files() -> None:
    """Raise the process's limit of open files, which most systems set for programs with few connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, limits.OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def check(named: Named, options: ServeOptions, load: LoadOptions, log: RequestLog) -> None:
    """Do all that `run` does before it serves, except listening; raises as `run` does."""
    with _loaded(named, options, load, log):
        pass


@contextlib.contextmanager
def _loaded(named: Named, options: ServeOptions, load: LoadOptions, log: RequestLog) -> Iterator[Service]:
    with contextlib.ExitStack() as closing:
        service = make_service(named, options, load, log, closing)
        for model in service.models.all:
            log.event("info", describe(model, load), model=model.name)
        yield service


def _check_reasoning(engine: Engine, options: ServeOptions, name: str) -> None:
    """Raise OptionError if what ends a reasoning is no token of a model."""
    reasoning = options.reading.reasoning
    end = reasoning.end if reasoning else options.reasoning_end
    if end and engine.tokenizer.token_id(end) is None:
        unknown = f"a reasoning's end is {shown(end)}, which is no token of {name}"
        raise OptionError(f"{unknown}: name the one that ends its reasoning")


def make_service(
    named: Named,
    options: ServeOptions,
    load: LoadOptions,
    log: RequestLog,
    closing: contextlib.ExitStack,
) -> Service:
    """Load every bundle in a thread of its own, warm each up, and return the service.

    Args:
        named: Names and folder of each bundle.
        options: How the server answers.
        load: How bundles are loaded.
        log: The server's log.
        closing: Closes the engines and the ledger when it is closed.

    Raises:
        OptionError: If an option is wrong.
        BundleError: If a bundle is wrong.
        ExecutionError: If a bundle's models cannot be loaded, or fail in the warm-up.
    """
    ledger = Ledger(options.cost, log) if options.cost.ledger else None
    if ledger:
        closing.callback(ledger.close)
    models, metrics = _load(named, options, load, closing)
    served = Models(models)
    canary = Canary(served, options.canary, log) if options.canary else None
    oracle = Oracle(served, options, metrics, log, canary) if options.shadow or canary else None
    sample = TextSample(options.text_sample, options.text_sample_share, log) if options.text_sample else None
    watchers: list[Watcher] = [each for each in (oracle, canary, sample) if each]
    if canary:
        metrics.registry.register(CanaryMetrics(canary))
    if ledger:
        ledger.begin(models)
        watchers.append(ledger)
    supervisor = Supervisor(watchers, log)
    metrics.registry.register(supervisor)
    rates = RateLimits(options.requests_per_minute, options.tokens_per_minute)
    return Service(
        served, options, metrics, rates=rates, oracle=oracle, canary=canary, watchers=watchers, supervisor=supervisor
    )


def _load(
    named: Named, options: ServeOptions, load: LoadOptions, closing: contextlib.ExitStack
) -> tuple[list[ServedModel], Metrics]:
    """Load every bundle in a thread of its own and warm each up; return the models and the metrics they report to."""
    metrics = Metrics({}, options.metrics_prefix, options.cost)

    def one(names: tuple[str, ...], path: Path) -> ServedModel:
        bundle = Bundle.open(path)
        size = options.max_num_seqs or bundle.manifest.max_batch_size
        finished = partial(metrics.finished, names[0])
        engine = Engine.load(path, replace(load, batch_size=size, max_waiting=options.max_waiting, on_finish=finished))
        closing.callback(engine.close)
        _check_reasoning(engine, options, names[0])
        metrics.add(names[0], engine)
        admission = Admission(size, options.max_waiting, options.max_queued_tokens)
        return ServedModel(names, path, AsyncEngine(engine), defaults_of(bundle), admission)

    with ThreadPoolExecutor(len(named)) as pool:
        loaded = list(pool.map(lambda each: one(*each), named))
    return [replace(model, plain_rate=warm_up(model.engine.engine)) for model in loaded], metrics


def describe(model: ServedModel, load: LoadOptions) -> str:
    """Return a line about a served model: its backend, planned memory, measured speed and sampling defaults."""
    engine, manifest = model.engine.engine, model.manifest
    models = ("target",) if load.drafter == "ngram" else ()
    memory = plan(manifest, engine.batch_size, None, models, load.kv_cache_tokens)
    parts = [
        f"{', '.join(model.names)}: {model.path}, {manifest.precision} on {manifest.backend}",
        f"{engine.batch_size} at once, {engine.max_model_len} tokens each",
        f"{memory.total / 1e6:.0f} MB planned, {memory.caches / 1e6:.0f} of them caches",
    ]
    if model.plain_rate:
        parts.append(f"plain decoding measured at {model.plain_rate:.0f} tokens/s")
    own = {name: value for name, value in model.defaults.items() if value != DEFAULTS[name]}
    changed = "".join(f", {name} {value:g} by its checkpoint" for name, value in own.items() if name != "temperature")
    parts.append(
        f"defaults: temperature {model.defaults['temperature']:g}{changed}, {COMPLETION_TOKENS} tokens for a "
        "completion, a chat to the context's end"
    )
    return "; ".join(parts)


class _Uvicorn(uvicorn.Server):
    """Uvicorn's server without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to `_Life`."""
        yield


def _uvicorn(app: ASGIApp, options: ServeOptions) -> _Uvicorn:
    return _Uvicorn(
        uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=limits.KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_GRACE,
            h11_max_incomplete_event_size=limits.HEADER_BYTES,
            ssl_certfile=options.ssl_certfile,
            ssl_keyfile=options.ssl_keyfile,
        )
    )


class _Life:
    """A server from its first request to its last."""

    def __init__(self, service: Service, log: RequestLog, places: Sequence[Place]) -> None:
        self._service, self._log, self._places = service, log, places
        self._stopping = asyncio.Event()
        apps = make_app(service, log), make_operators_app(service, log)
        self._servers = [_uvicorn(app, service.options) for app in apps[: len(places)]]

    async def run(self) -> int:
        """Serve until a signal or the death of a worker; return the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, self._signal, number)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # supervisors send it for a log file, of which there is none
        pairs = zip(self._servers, self._places, strict=True)
        serving = [loop.create_task(each.serve([listening])) for each, (_, listening) in pairs]
        stopping = loop.create_task(self._stopping.wait())
        dying = loop.create_task(self._death())
        watching = [loop.create_task(each.run()) for each in (self._service.supervisor,) if each]
        for told, (options, listening) in reversed([*zip(("serving", "operators"), self._places, strict=False)]):
            self._log.event("info", f"{told} at {listener.url(listening, options)}")
        await asyncio.wait({*serving, stopping, dying}, return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            await self._drain()
        self._service.drain()
        for each in self._servers:
            each.should_exit = True
        await asyncio.gather(*serving)
        status = 1 if dying.done() else 0
        for task in (stopping, dying, *watching):
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        return status

    def _signal(self, number: int) -> None:
        """Drain on the first signal, stop at once on the second."""
        if not self._stopping.is_set():
            self._stopping.set()
            return
        self._log.event("warning", f"stopped at once by a second {signal.Signals(number).name}")
        for options, listening in self._places:
            listener.close(listening, options)
        os._exit(1)

    async def _drain(self) -> None:
        """Refuse new requests, finish those in progress, and cancel those that take too long; each is answered."""
        service, began = self._service, time.monotonic()
        service.drain()
        self._log.event("info", f"draining: {service.requests} requests under way")
        while service.requests and time.monotonic() - began < service.options.shutdown_timeout:
            await asyncio.sleep(_LOOK)
        if left := service.requests:
            self._log.event("warning", f"{left} requests were not done in time, and are cancelled")
            await asyncio.gather(*(model.engine.close() for model in service.models.all))

    async def _death(self) -> None:
        """Return when a worker has died, since its engine emits nothing more."""
        while True:
            for model in self._service.models.all:
                health = model.engine.engine.health()
                if health.state == "failed":
                    self._log.event(
                        "error", f"the worker of {model.name} died ({health.error}): ending", model=model.name
                    )
                    return
            await asyncio.sleep(_LOOK)
