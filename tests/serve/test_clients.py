"""Clients that nobody here wrote: the `openai` package, and schemathesis against the served schema."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from serving import CHAT_TEMPLATE, Server

from specbuild.runtime import Bundle

pytestmark = pytest.mark.slow
SAID: Any = [{"role": "user", "content": "a loop"}]


@pytest.fixture(scope="module")
def server(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    template = tmp_path_factory.mktemp("serve") / "chat.jinja"
    template.write_text(CHAT_TEMPLATE)
    flags = ["--port", "0", "--api-key", "secret", "--chat-template", str(template)]
    with Server(str(bundle), *flags, "--max-model-len", "48", "--request-timeout", "2") as server:
        yield server


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0)


def test_completions(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="pycode", prompt="def main(", max_tokens=8, temperature=0, logprobs=2)
    assert whole.usage
    assert whole.usage.completion_tokens == 8
    logprobs = whole.choices[0].logprobs
    assert logprobs
    assert logprobs.tokens
    assert len(logprobs.tokens) == 8
    chunks = client.completions.create(model="pycode", prompt="def main(", max_tokens=8, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


def test_chats(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "pycode", "messages": SAID, "max_completion_tokens": 8, "seed": 1, "n": 2}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    assert [choice.message.role for choice in whole.choices] == ["assistant", "assistant"]
    logprobs = whole.choices[0].logprobs
    assert logprobs
    assert logprobs.content
    assert len(logprobs.content[0].top_logprobs) == 2
    texts, usage = ["", ""], None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert usage
    assert whole.usage
    assert usage.total_tokens == whole.usage.total_tokens


def test_the_helper_that_collects_a_stream(client: openai.OpenAI, bundle: Path) -> None:
    """It takes no text that was cut at a length for a whole one."""
    end = str(Bundle.open(bundle).manifest.eos_token_ids[0])
    asked: dict[str, Any] = {"model": "pycode", "messages": SAID, "max_tokens": 8, "temperature": 0}
    asked |= {"logit_bias": {end: 100}, "extra_body": {"min_tokens": 4}}
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion()
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content
    assert final.choices[0].message.content == whole.choices[0].message.content


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["pycode"]
    assert client.models.retrieve("pycode").owned_by == "specbuild"


def test_errors_are_of_its_kinds(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt", prompt="x")
    with pytest.raises(openai.BadRequestError, match="tokens") as refused:
        client.completions.create(model="pycode", prompt="x " * 100)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="pycode", prompt="x", extra_body={"colour": 1})
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="other").models.list()


@pytest.mark.soak(only=("30",))
@pytest.mark.parametrize("examples", ["3", "30"])
def test_schemathesis_finds_nothing(server: Server, tmp_path: Path, examples: str) -> None:
    """Every route, with data by the schema and against it: no fault of the server, no response but its own.

    One worker: with two, one sets the limit of recursion while the other parses, which Python 3.11 takes for a fault.
    """
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--checks", checks]
    command += ["--header", "Authorization: Bearer secret", "--max-examples", examples, "--seed", "1", "--workers", "1"]
    command += ["--phases", "examples,coverage,fuzzing", "--suppress-health-check", "all"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
