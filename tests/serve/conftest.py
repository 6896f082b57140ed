"""A service over the reference pair, in this process, behind a client; and a server in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from route_client import RouteClient, service_of
from serving import CHAT_TEMPLATE, Log, Server

from specbuild.runtime import Engine


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Iterator[Engine]:
    with Engine.load(bundle, batch_size=4, max_waiting=16, chat_template=CHAT_TEMPLATE) as engine:
        yield engine


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def make_client(engine: Engine, bundle: Path, log: Log) -> Iterator[Callable[..., RouteClient]]:
    """`make_client(**ServeOptions)`: a client of the service."""
    with ExitStack() as stack:

        def make(**given: Any) -> RouteClient:
            service = service_of(engine, bundle, log, **given)
            stack.callback(service.pool.shutdown)
            return RouteClient(service, log)

        yield make


@pytest.fixture
def client(make_client: Callable[..., RouteClient]) -> RouteClient:
    return make_client()


@pytest.fixture(scope="session")
def chat_template(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file of a template."""
    path = tmp_path_factory.mktemp("template") / "chat.jinja"
    path.write_text(CHAT_TEMPLATE, encoding="utf-8")
    return str(path)


@pytest.fixture(scope="session")
def server(bundle: Path, chat_template: str) -> Iterator[Server]:
    """A server of chats and the page, which a page from a file may ask too."""
    flags = ("--port", "0", "--max-num-seqs", "2", "--ui", "--allowed-origins", '["null"]')
    with Server(str(bundle), *flags, "--chat-template", chat_template) as server:
        yield server
