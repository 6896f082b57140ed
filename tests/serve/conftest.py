"""A service over the reference pair, in this process, behind a client; and a server in a process of its own."""

from contextlib import ExitStack

import pytest
from route_client import RouteClient, service_of
from serving import CHAT_TEMPLATE, Log, Server

from specbuild.runtime import Engine


@pytest.fixture(scope="module")
def engine(bundle):
    with Engine.load(bundle, batch_size=4, max_waiting=16, chat_template=CHAT_TEMPLATE) as engine:
        yield engine


@pytest.fixture
def log():
    return Log()


@pytest.fixture
def make_client(engine, bundle, log):
    """`make_client(**ServeOptions)`: a client of the service."""
    with ExitStack() as stack:

        def make(**given):
            service = service_of(engine, bundle, log, **given)
            stack.callback(service.pool.shutdown)
            return RouteClient(service, log)

        yield make


@pytest.fixture
def client(make_client):
    return make_client()


@pytest.fixture(scope="session")
def chat_template(tmp_path_factory):
    """The file of a template."""
    path = tmp_path_factory.mktemp("template") / "chat.jinja"
    path.write_text(CHAT_TEMPLATE, encoding="utf-8")
    return str(path)


@pytest.fixture(scope="session")
def server(bundle, chat_template):
    """A server of chats and the page, which a page from a file may ask too."""
    flags = ("--port", "0", "--max-num-seqs", "2", "--ui", "--allowed-origins", '["null"]')
    with Server(str(bundle), *flags, "--chat-template", chat_template) as server:
        yield server
