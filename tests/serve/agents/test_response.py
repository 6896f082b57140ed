"""The response object; `test_routes.py` has it behind a client."""

from __future__ import annotations

from fastapi.testclient import TestClient


def test_it_says_what_was_asked(client: TestClient) -> None:
    asked = {"input": "x", "max_output_tokens": 2, "metadata": {"a": "b"}, "instructions": "brief", "user": "me"}
    body = client.post("/v1/responses", json=asked).json()
    assert {name: body[name] for name in asked if name != "input"} == {
        name: asked[name] for name in asked if name != "input"
    }
    assert (body["tool_choice"], body["tools"], body["truncation"]) == ("auto", [], "disabled")
    assert body["usage"]["input_tokens_details"]["cached_tokens"] >= 0
    assert body["metrics"]["speculative_decoding"]
