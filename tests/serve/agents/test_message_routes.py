"""/v1/messages from a client's side: errors of Anthropic's shape, and its header for keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1, "temperature": 0}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    ("fields", "status", "kind", "told"),
    [
        ({"colour": "red"}, 400, "invalid_request_error", "unknown field 'colour'"),
        ({"messages": []}, 400, "invalid_request_error", "messages: "),
        ({"model": "other"}, 404, "not_found_error", "other"),
        ({"tool_choice": {"type": "tool"}}, 400, "invalid_request_error", "tool_choice has a name"),
    ],
)
def test_errors_have_anthropics_shape(
    client: TestClient, path: str, fields: dict[str, Any], status: int, kind: str, told: str
) -> None:
    asked = ASKED if path == "/v1/messages" else {"messages": ASKED["messages"]}
    reply = client.post(path, json=asked | fields)
    assert (reply.status_code, reply.json()["type"], reply.json()["error"]["type"]) == (status, "error", kind)
    assert told in reply.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"\x15\xf0", b"{", b"[]", b""])
def test_a_body_that_is_no_json_is_refused(client: TestClient, body: bytes) -> None:
    reply = client.post("/v1/messages", content=body, headers={"Content-Type": "application/json"})
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")


def test_a_key_may_come_by_anthropics_header(make_client: Callable[..., TestClient]) -> None:
    client = make_client(api_keys=("secret",))
    assert client.post("/v1/messages", json=ASKED, headers={"x-api-key": "secret"}).status_code == 200
    assert client.post("/v1/messages", json=ASKED, headers={"x-api-key": "other"}).status_code == 401
