"""Clients of other projects against `specbuild serve`, and a file that starts one beside it."""

import json

import pytest
import yaml

from specbuild.cli.application import cli
from specbuild.cli.serve import command

from .conftest import EXAMPLES


def plain(server, messages, max_tokens):
    """A chat's text by plain decoding."""
    body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0, "speculation": "off"}
    with server.client() as client:
        return client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]


@pytest.mark.nightly
def test_langchain(example, server, capsys):
    pytest.importorskip("langchain_openai", reason="LangChain is not installed")
    topic = example("langchain_chat").main(f"{server.url}/v1", "coder", "main(argv)", 100)
    out = capsys.readouterr().out
    messages = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "main(argv)"}]
    assert out == f"{plain(server, messages, 100)}\n{topic!r}\n"


@pytest.mark.nightly
def test_litellm(example, server, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it fetches prices when it is imported
    pytest.importorskip("litellm", reason="LiteLLM is not installed")
    answer = example("litellm_chat").main(f"{server.url}/v1", "coder", "main(argv)", 20)
    assert answer == plain(server, [{"role": "user", "content": "main(argv)"}], 20)


def test_open_webui_asks_the_server_that_is_started_beside_it():
    services = yaml.safe_load((EXAMPLES / "open-webui.yaml").read_text(encoding="utf-8"))["services"]
    served, page = services["specbuild"], services["open-webui"]
    image = (EXAMPLES / served["build"]["context"] / served["build"]["dockerfile"]).read_text(encoding="utf-8")
    (entry,) = (json.loads(line.partition(" ")[2]) for line in image.splitlines() if line.startswith("ENTRYPOINT"))
    arguments = [*entry[2:], *served["command"]]
    parent = cli.make_context("specbuild", [], resilient_parsing=True)
    context = command.make_context("serve", arguments, parent, resilient_parsing=True)
    assert context.params["bundles"] == (served["volumes"][0].split(":")[-2],)
    port = next(option.default for option in command.params if option.name == "port")
    assert page["environment"]["OPENAI_API_BASE_URL"] == f"http://specbuild:{port}/v1"
    assert f"localhost:{port}/health/ready" in served["healthcheck"]["test"][-1]
    assert set(page["depends_on"]) == {"specbuild"}
