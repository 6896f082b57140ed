"""Answers: what is kept of a request when it has ended, however it ended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from threading import Event
from typing import Any

import pytest
from fastapi.testclient import TestClient
from serving import Log

from specbuild.runtime.decoding.emission import Emission
from specbuild.serve.generation import EventStream

ASKED: dict[str, Any] = {"prompt": "def main(", "max_tokens": 12, "temperature": 0}


def test_a_stream_is_logged_when_it_has_ended(client: TestClient, log: Log) -> None:
    client.post("/v1/completions", json=ASKED | {"stream": True})
    (line,) = [line for line in log.lines if line["path"] == "/v1/completions"]
    assert (line["status"], line["output_tokens"], line["finish_reason"]) == (200, 12, "length")
    assert line["ttft"] > 0
    assert line["draft_tokens"] >= line["accepted_tokens"]


def test_prompts_are_kept_where_that_is_asked_for(make_client: Callable[..., TestClient], log: Log) -> None:
    text = make_client(log_requests=True).post("/v1/completions", json=ASKED).json()["choices"][0]["text"]
    assert json.loads(log.lines[-1]["prompt"])["prompt"] == "def main("
    assert json.loads(log.lines[-1]["text"]) == [text]


class Span:
    """What a trace is told."""

    def __init__(self) -> None:
        self.ends: list[tuple[int, str | None]] = []

    def begin(self, *told: Any) -> Span:
        return self

    def end(self, prompt_tokens: int, results: Any, error: str | None) -> None:
        self.ends.append((prompt_tokens, error))


@pytest.fixture
def span(client: TestClient) -> Span:
    span = Span()
    object.__setattr__(client.service, "traces", span)  # type: ignore[attr-defined]
    return span


def rejections(client: TestClient) -> list[str]:
    return [
        line
        for line in client.get("/metrics").text.splitlines()
        if line.startswith("specbuild:admission_rejections_total{")
    ]


def test_a_fault_amid_a_stream_is_logged_and_traced(
    client: TestClient, log: Log, span: Span, monkeypatch: pytest.MonkeyPatch
) -> None:
    note, left, begun = Emission.note, [3], Event()

    def broken(self: Emission, *given: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            assert begun.wait(60), "no response begins"
            raise ValueError("planted")
        note(self, *given)

    def begin(events: Any) -> EventStream:
        begun.set()
        return EventStream(events)

    monkeypatch.setattr(Emission, "note", broken)
    monkeypatch.setattr("specbuild.serve.answer.EventStream", begin)
    client.post("/v1/completions", json=ASKED | {"stream": True, "speculation": "off"})
    assert (log.lines[-1]["status"], "planted" in log.lines[-1]["error"]) == (200, True)
    assert span.ends == [(3, "500")]
    assert not rejections(client)


def test_a_refusal_is_traced_and_counted(client: TestClient, span: Span) -> None:
    client.service.drain()  # type: ignore[attr-defined]
    try:
        assert client.post("/v1/completions", json=ASKED | {"stream": True}).status_code == 503
    finally:
        client.service.models.all[0].admission.draining = False  # type: ignore[attr-defined]
    assert span.ends == [(0, "draining")]
    assert rejections(client) == ['specbuild:admission_rejections_total{model_name="pycode",reason="draining"} 1.0']


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_no_error_of_ours(client: TestClient, log: Log, span: Span, stream: bool) -> None:
    body = json.dumps(ASKED | {"stream": stream, "max_tokens": 900, "ignore_eos": True}).encode()
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
    }

    async def main() -> None:
        sent, left = asyncio.Event(), [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if left:
                return left.pop()
            if stream:
                await sent.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message.get("body"):
                sent.set()

        await client.app(scope, receive, send)  # type: ignore[arg-type]

    asyncio.run(main())
    assert (log.lines[-1]["status"], log.lines[-1]["error"]) == (200 if stream else 499, "the client left")
    assert [error for _, error in span.ends] == ["499"]
    assert client.service.models.all[0].admission.requests == 0  # type: ignore[attr-defined]
    assert not rejections(client)
