"""Clouds' routes from a client's side, with the payloads of their documentation, and Hugging Face's own client."""

import pytest
from huggingface_hub import InferenceClient
from route_client import SAID

PROMPT = "def parse(text):\n"
TEXT = {"inputs": PROMPT, "parameters": {"max_new_tokens": 8}}


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({"prompt": PROMPT, "max_tokens": 8, "temperature": 0}, ("choices", 0, "text")),
        ({"messages": SAID, "max_tokens": 8, "temperature": 0}, ("choices", 0, "message", "content")),
        (TEXT, (0, "generated_text")),
    ],
)
def test_sagemaker_sends_any_kind_of_body(client, body, where):
    told = client.ask("/invocations", **body)
    for key in where:
        told = told[key]
    assert told
    assert isinstance(told, str)
    assert client.events("/invocations", **body)


def test_vertex_predicts_all_instances_or_none(client):
    short, other = {"inputs": PROMPT, "parameters": {"max_new_tokens": 2}}, {"inputs": "import os"}
    instances = [{"inputs": PROMPT}, short, other]
    told = client.ask("/predict", instances=instances, parameters=TEXT["parameters"])["predictions"]
    assert told == [client.ask("/generate", **TEXT | each)["generated_text"] for each in instances]
    assert client.refusal("/predict", instances=[{"prompt": "x"}, {"prompt": "x", "max_tokens": 0}])[0] == 400
    assert client.refusal("/predict", instances=[{"inputs": "x", "stream": True}])[0] == 400


def test_vertex_s_chats_and_completions_are_whole_responses(client):
    chat = {"@requestFormat": "chatCompletions", "messages": SAID}
    body = {"instances": [chat, {"prompt": PROMPT}], "parameters": {"max_tokens": 4, "temperature": 0}}
    first, second = client.ask("/predict", **body)["predictions"]
    assert (first["object"], second["object"]) == ("chat.completion", "text_completion")
    assert first["usage"]["completion_tokens"] == second["usage"]["completion_tokens"] == 4
    assert first["id"] != second["id"]
    assert client.ask("/predict", messages=SAID, max_tokens=4)["object"] == "chat.completion", "a raw prediction"


def test_clouds_name_their_routes_and_ping(make_client):
    client = make_client(health_route="/up", predict_route="/v1/endpoints/7:predict", api_keys=("secret",))
    assert [client.get(path).status_code for path in ("/up", "/ping")] == [200, 200]
    key, body = {"Authorization": "Bearer secret"}, {"instances": [TEXT]}
    assert len(client.post("/v1/endpoints/7:predict", json=body, headers=key).json()["predictions"]) == 1
    assert client.post("/v1/endpoints/7:predict", json=body).status_code == 401
    assert client.post("/predict", json=body, headers=key).status_code == 404
    client.service.drain()
    assert client.get("/ping").status_code == 503


@pytest.mark.slow
def test_hugging_face_s_client(server):
    client = InferenceClient(server.url)
    text = client.text_generation(PROMPT, max_new_tokens=16)
    assert "".join(client.text_generation(PROMPT, max_new_tokens=16, stream=True)) == text
    told = client.text_generation(PROMPT, max_new_tokens=16, details=True, stop=["zzz"])
    assert (told.generated_text, told.details.generated_tokens) == (text, 16)
    events = list(client.text_generation(PROMPT, max_new_tokens=16, details=True, stream=True))
    assert (events[-1].generated_text, len(events)) == (text, 16)
