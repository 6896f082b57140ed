"""The service: the engine's results over HTTP, its refusals as status codes, clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from specbuild.runtime import Engine, SamplingParams

ASKED = {"prompt": "def main(", "max_new_tokens": 12}


@pytest.fixture
def client(example: Any, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    monkeypatch.setenv("SPECBUILD_BUNDLE", str(bundle))
    monkeypatch.setenv("SPECBUILD_OPTIONS", '{"batch_size": 1, "max_waiting": 1}')
    with TestClient(example("fastapi_service").app) as client:
        yield client


def at_rest(client: TestClient) -> None:
    scheduler = client.app.state.engine.engine.scheduler  # type: ignore[attr-defined]
    with scheduler.exclusive():
        assert (scheduler.free, list(scheduler.waiting)) == ([0], [])


def test_results_and_streams_are_the_engines(client: TestClient, bundle: Path) -> None:
    with Engine.load(bundle) as engine:
        (want,) = engine.generate("def main(", SamplingParams(max_new_tokens=12))
    reply = client.post("/generate", json=ASKED)
    assert reply.status_code == 200
    (result,) = reply.json()
    assert (result["text"], result["token_ids"]) == (want.text, want.token_ids)
    with client.stream("POST", "/generate", json=ASKED | {"stream": True}) as streamed:
        assert streamed.headers["content-type"] == "application/x-ndjson"
        chunks = [json.loads(line) for line in streamed.iter_lines()]
    assert "".join(chunk["text"] for chunk in chunks) == want.text
    assert chunks[-1]["result"]["token_ids"] == want.token_ids
    assert not any(chunk["result"] for chunk in chunks[:-1])
    samples = client.post("/generate", json=ASKED | {"n": 2, "temperature": 1, "seed": 3}).json()
    assert [each["metrics"]["seed"] for each in samples] == [3, 4]
    at_rest(client)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"prompt": ""}, "empty"),
        ({}, "a text"),
        ({"prompt": []}, "a text"),
        ({"prompt": 5}, "a text"),
        ({"prompt": "x", "top_k": -1}, "top_k"),
        ({"prompt": "x", "tempratur": 1}, "tempratur"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "chat template"),
    ],
)
def test_bad_input_is_400(client: TestClient, fields: dict[str, Any], word: str, stream: bool) -> None:
    reply = client.post("/generate", json=fields | {"stream": stream})
    assert reply.status_code == 400
    assert word in reply.json()["error"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_429(client: TestClient, stream: bool) -> None:
    engine = client.app.state.engine.engine  # type: ignore[attr-defined]
    with engine.scheduler.exclusive():  # nothing starts meanwhile
        waiting = engine.submit("x", SamplingParams(max_new_tokens=2))
        reply = client.post("/generate", json=ASKED | {"stream": stream})
    assert reply.status_code == 429
    assert "queue" in reply.json()["error"]
    assert waiting.result().finish_reason == "length"
    assert client.post("/generate", json=ASKED).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slot(client: TestClient, stream: bool) -> None:
    """Spoken to as a server speaks to it: the body, then that the client has gone."""
    engine = client.app.state.engine.engine  # type: ignore[attr-defined]
    body = json.dumps({"prompt": "x", "max_new_tokens": 900, "ignore_eos": True, "stream": stream}).encode()
    sent: list[Any] = []

    async def speak() -> None:
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])
        begun = asyncio.Event()

        async def receive() -> Any:
            message = next(messages, None)
            if message is None and stream:
                await begun.wait()
            return message or {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            begun.set()

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": "/generate",
            "raw_path": b"/generate",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        await client.app(scope, receive, send)

    before = engine.stats.emitted
    asyncio.run(speak())
    at_rest(client)
    assert engine.stats.emitted - before < 900
    assert sent[0]["status"] == (200 if stream else 499)
