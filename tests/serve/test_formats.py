"""Formats: what goes wrong in the middle of a stream is an event of it, before its first a status."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

from specbuild.runtime import Engine
from specbuild.runtime.decoding.emission import Emission
from specbuild.serve.formats import event

ASKED: dict[str, Any] = {"prompt": "def main(", "max_tokens": 12, "temperature": 0}


def test_an_event_is_a_line_of_json() -> None:
    assert event({"text": "a\nb\u2028ä"}) == 'data: {"text":"a\\nb\u2028ä"}\n\n'.encode()


def failing(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """The model's own fault after so many tokens, as a NaN would be."""
    note, left = Emission.note, [after]

    def broken(self: Emission, *given: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise ValueError("planted")
        note(self, *given)

    monkeypatch.setattr(Emission, "note", broken)


def test_a_fault_before_the_first_token_is_a_status(
    client: TestClient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, 0)
    for stream in (False, True):
        reply = client.post("/v1/completions", json=ASKED | {"stream": stream})
        assert (reply.status_code, "planted" in reply.json()["error"]["message"]) == (500, True)
    assert client.service.models.all[0].admission.requests == 0  # type: ignore[attr-defined]


def test_a_fault_in_the_middle_is_an_event(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, 3)
    reply = client.post("/v1/completions", json=ASKED | {"stream": True, "speculation": "off"})
    lines = [line for line in reply.text.splitlines() if line]
    assert (reply.status_code, lines[-1]) == (200, "data: [DONE]")
    assert "planted" in json.loads(lines[-2].removeprefix("data: "))["error"]["message"]


def test_token_ids_are_all_there_even_where_no_text_is(client: TestClient, engine: Engine) -> None:
    body = ASKED | {"max_tokens": 40, "temperature": 1, "seed": 4, "ignore_eos": True, "return_token_ids": True}
    whole = client.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]
    reply = client.post("/v1/completions", json=body | {"stream": True})
    parts = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    assert [token for each in parts for token in each["choices"][0]["token_ids"]] == whole


@pytest.mark.parametrize(
    ("path", "asked", "text"),
    [
        ("/v1/completions", {"prompt": "def main("}, lambda choice: choice["text"]),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}]},
            lambda choice: choice["delta"].get("content", ""),
        ),
    ],
)
def test_tokens_without_text_come_with_an_empty_one(
    client: TestClient, path: str, asked: dict[str, Any], text: Callable[[Any], str]
) -> None:
    """All that is said may become a stop string, until the end: clients read the text of every event."""
    body = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True} | asked
    whole = client.post(path, json=body).json()["choices"][0]
    said = whole.get("text") or whole["message"]["content"]
    held = body | {"stop": [said + "x"], "stream": True, "speculation": "off"}
    parts = [json.loads(line[6:]) for line in client.post(path, json=held).text.splitlines() if line[6:7] == "{"]
    choices = [part["choices"][0] for part in parts]
    assert [text(choice) for choice in choices] == [*[""] * (len(choices) - 1), said]
    assert [token for choice in choices for token in choice["token_ids"]] == whole["token_ids"]
    assert len(choices) > 1


def test_each_token_says_whether_it_was_drafted(client: TestClient, engine: Engine) -> None:
    body = ASKED | {"max_tokens": 40, "temperature": 0, "ignore_eos": True, "speculation": "chain:4"}
    whole = client.post("/v1/completions", json=body | {"return_token_sources": True}).json()["choices"][0]
    sources = whole["token_sources"]
    assert "".join(each["text"] for each in sources) == whole["text"]
    counts = whole["metrics"]["speculative_decoding"]
    assert sum(each["drafted"] for each in sources) == counts["num_accepted_draft_tokens"] > 0
    reply = client.post("/v1/completions", json=body | {"return_token_sources": True, "stream": True})
    parts = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    assert [each for part in parts for each in part["choices"][0]["token_sources"]] == sources
    plain = client.post("/v1/completions", json=body | {"return_token_sources": True, "speculation": "off"}).json()
    assert not any(each["drafted"] for each in plain["choices"][0]["token_sources"])
    assert "token_sources" not in client.post("/v1/completions", json=body).json()["choices"][0]
