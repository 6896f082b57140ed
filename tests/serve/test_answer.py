"""Answers: what is kept of a request when it has ended, however it ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fastapi.testclient import TestClient
from serving import Log

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
