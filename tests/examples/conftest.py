"""Fixtures of the examples' tests: each example as a module, and a server of chats."""

import importlib.util
from pathlib import Path

import pytest
from serving import CHAT_TEMPLATE, Server

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"


@pytest.fixture
def example():
    """`example(name)`: a fresh import of one of the examples."""

    def load(name):
        spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def server(bundle, tmp_path_factory):
    """The reference pair with a chat template, served as `coder`."""
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(CHAT_TEMPLATE, encoding="utf-8")
    with Server(f"coder={bundle}", "--port", "0", "--chat-template", str(template)) as server:
        yield server
