"""Clouds' routes from a client's side, with the payloads of their documentation, and Hugging Face's own client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from huggingface_hub import InferenceClient
from serving import CHAT_TEMPLATE, Server

PROMPT = "def parse(text):\n"
CHAT = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({"prompt": PROMPT, "max_tokens": 8, "temperature": 0}, ("choices", 0, "text")),
        ({"messages": CHAT, "max_tokens": 8, "temperature": 0}, ("choices", 0, "message", "content")),
        ({"inputs": PROMPT, "parameters": {"max_new_tokens": 8}}, (0, "generated_text")),
    ],
)
def test_sagemaker_sends_any_kind_of_body(client: TestClient, body: dict[str, Any], where: tuple[Any, ...]) -> None:
    told: Any = client.post("/invocations", json=body).json()
    for key in where:
        told = told[key]
    assert isinstance(told, str)
    assert told
    streamed = client.post("/invocations", json=body | {"stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.text.startswith("data: {")


def test_sagemaker_pings(make_client: Callable[..., TestClient]) -> None:
    client = make_client(api_keys=("secret",))
    assert client.get("/ping").status_code == 200
    client.service.drain()  # type: ignore[attr-defined]
    assert client.get("/ping").status_code == 503


def test_vertex_predicts_all_instances(client: TestClient) -> None:
    body = {
        "instances": [
            {"inputs": PROMPT},
            {"inputs": PROMPT, "parameters": {"max_new_tokens": 2}},
            {"inputs": "import os"},
        ],
        "parameters": {"max_new_tokens": 8},
    }
    told = client.post("/predict", json=body).json()["predictions"]
    single = [
        client.post("/generate", json={"inputs": text, "parameters": {"max_new_tokens": count}}).json()[
            "generated_text"
        ]
        for text, count in ((PROMPT, 8), (PROMPT, 2), ("import os", 8))
    ]
    assert told == single


def test_vertex_s_chats_and_completions_are_whole_responses(client: TestClient) -> None:
    chat = {"@requestFormat": "chatCompletions", "messages": CHAT, "temperature": 0}
    body = {"instances": [chat, {"prompt": PROMPT, "temperature": 0}], "parameters": {"max_tokens": 4}}
    first, second = client.post("/predict", json=body).json()["predictions"]
    assert (first["object"], second["object"]) == ("chat.completion", "text_completion")
    assert first["usage"]["completion_tokens"] == second["usage"]["completion_tokens"] == 4
    assert first["id"] != second["id"]


def test_vertex_s_raw_predictions_are_any_body(client: TestClient) -> None:
    told = client.post("/predict", json={"messages": CHAT, "max_tokens": 4}).json()
    assert told["object"] == "chat.completion"


def test_vertex_names_the_routes(make_client: Callable[..., TestClient]) -> None:
    client = make_client(health_route="/up", predict_route="/v1/endpoints/7:predict", api_keys=("secret",))
    assert client.get("/up").status_code == 200
    key = {"Authorization": "Bearer secret"}
    body = {"instances": [{"inputs": PROMPT}], "parameters": {"max_new_tokens": 2}}
    assert len(client.post("/v1/endpoints/7:predict", json=body, headers=key).json()["predictions"]) == 1
    assert client.post("/v1/endpoints/7:predict", json=body).status_code == 401
    assert client.post("/predict", json=body, headers=key).status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/invocations", {}, "give inputs, messages or prompt"),
        ("/invocations", {"messages": []}, "messages"),
        ("/predict", {"instances": []}, "instances"),
        ("/predict", {"instances": [{"inputs": "x"}], "colour": 1}, "unknown field 'colour'"),
        ("/predict", {"instances": [{"prompt": "x"}, {"prompt": "x", "max_tokens": 0}]}, "max_tokens"),
        ("/predict", {"instances": [{"inputs": "x", "stream": True}]}, "predictions are not streamed"),
    ],
)
def test_bad_bodies_are_refused(client: TestClient, path: str, body: dict[str, Any], told: str) -> None:
    reply = client.post(path, json=body)
    assert reply.status_code == 400
    assert told in reply.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/"])
@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({}, "inputs"),
        ({"inputs": "x", "parameters": {"temperature": 0}}, "temperature"),
        ({"inputs": "x", "parameters": {"colour": 0}}, "unknown field 'parameters.colour'"),
        ({"inputs": "x " * 4000}, "tokens"),
    ],
)
def test_errors_have_text_generation_inference_s_shape(
    client: TestClient, path: str, body: dict[str, Any], told: str
) -> None:
    reply = client.post(path, json=body)
    assert (reply.status_code, reply.json()["error_type"]) == (400, "validation")
    assert told in reply.json()["error"]


def test_what_serves(client: TestClient) -> None:
    told = client.get("/info").json()
    assert (told["model_id"], told["router"]) == ("pycode", "specbuild")


def test_hugging_face_s_client(bundle: Any, tmp_path: Any) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(CHAT_TEMPLATE)
    with Server(str(bundle), "--port", "0", "--chat-template", str(template)) as server:
        client = InferenceClient(server.url)
        text = client.text_generation(PROMPT, max_new_tokens=16)
        assert "".join(client.text_generation(PROMPT, max_new_tokens=16, stream=True)) == text
        told = client.text_generation(PROMPT, max_new_tokens=16, details=True, stop=["zzz"])
        assert (told.generated_text, told.details.generated_tokens) == (text, 16)
        events = list(client.text_generation(PROMPT, max_new_tokens=16, details=True, stream=True))
        assert events[-1].generated_text == text
        assert len(events) == 16
