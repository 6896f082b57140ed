"""A service over the reference pair, in this process, behind a client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from serving import CHAT_TEMPLATE, Log

from specbuild.runtime import AsyncEngine, Bundle, Engine
from specbuild.serve.admission import Admission
from specbuild.serve.answer import Service
from specbuild.serve.app import make_app
from specbuild.serve.canary import Canary
from specbuild.serve.canary_routes import CanaryMetrics
from specbuild.serve.drift import Drift
from specbuild.serve.metrics import Metrics
from specbuild.serve.models import Models, ServedModel
from specbuild.serve.options import ServeOptions
from specbuild.serve.oracle import Oracle
from specbuild.serve.parameters import defaults_of


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Iterator[Engine]:
    with Engine.load(bundle, batch_size=4, max_waiting=16, chat_template=CHAT_TEMPLATE) as engine:
        yield engine


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def make_client(engine: Engine, bundle: Path, log: Log) -> Iterator[Callable[..., TestClient]]:
    """`make_client(**ServeOptions)`: a client of the service; `client.service` is what it talks to."""
    with ExitStack() as stack:

        def make(**given: Any) -> TestClient:
            options = ServeOptions(**given)
            admission = Admission(engine.batch_size, options.max_waiting, options.max_queued_tokens)
            model = ServedModel(
                ("pycode", "alias"), bundle, AsyncEngine(engine), defaults_of(Bundle.open(bundle)), admission
            )
            models, metrics = Models([model]), Metrics({"pycode": engine}, options.metrics_prefix)
            oracle = Oracle(models, options, metrics, log) if options.shadow else None  # type: ignore[arg-type]
            keys = len(options.api_keys)
            canary = Canary(models, options.canary, log, keys) if options.canary else None  # type: ignore[arg-type]
            drift = Drift(models, options.drift, log) if options.drift else None  # type: ignore[arg-type]
            for each in (CanaryMetrics(canary) if canary else None, drift):
                if each:
                    metrics.registry.register(each)
            watchers = [each for each in (oracle, canary, drift) if each]
            service = Service(models, options, metrics, oracle=oracle, canary=canary, watchers=watchers)
            client = TestClient(make_app(service, log), raise_server_exceptions=False)
            client.service = service  # type: ignore[attr-defined]
            stack.callback(service.pool.shutdown)
            return client

        yield make


@pytest.fixture
def client(make_client: Callable[..., TestClient]) -> TestClient:
    return make_client()
