"""text-generation-inference's texts: what is asked becomes a completion, and its tokens together are its text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from specbuild.runtime import Engine, SamplingParams
from specbuild.serve.clouds.fields import GenerateRequest, Parameters
from specbuild.serve.clouds.tgi import MAX_NEW_TOKENS, completion_of, error_body
from specbuild.serve.errors import ApiError

PROMPT = "def parse(text):\n"


@pytest.mark.parametrize(
    ("parameters", "temperature"),
    [
        ({}, 0.0),
        ({"do_sample": False, "temperature": 1.0}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"temperature": 0.5}, 0.5),
        ({"top_k": 5}, 1.0),
        ({"top_p": 0.5, "temperature": 0.7}, 0.7),
    ],
)
def test_it_is_greedy_unless_something_asks_for_sampling(parameters: dict[str, Any], temperature: float) -> None:
    asked = GenerateRequest(inputs="x", parameters=Parameters(**parameters))
    found = completion_of(asked, stream=False)
    assert (found.temperature, found.max_tokens, found.logprobs) == (temperature, MAX_NEW_TOKENS, None)
    assert completion_of(asked, stream=True).logprobs == 0


@pytest.mark.parametrize(
    ("kind", "value", "structure"),
    [
        ("json", {"type": "object"}, {"json": {"type": "object"}}),
        ("json_schema", {"name": "a", "schema": {"type": "null"}}, {"json": {"type": "null"}}),
        ("regex", "a+", {"regex": "a+"}),
    ],
)
def test_a_grammar_is_a_structure(kind: str, value: Any, structure: dict[str, Any]) -> None:
    asked = GenerateRequest.model_validate({"inputs": "", "parameters": {"grammar": {"type": kind, "value": value}}})
    found = completion_of(asked, stream=False).structured_outputs
    assert found is not None
    assert found.model_dump(by_alias=True, exclude_none=True) == structure


@pytest.mark.parametrize(("kind", "value"), [("json", "x"), ("regex", {}), ("json_schema", {"name": "a"})])
def test_a_grammar_of_another_kind_is_refused(kind: str, value: Any) -> None:
    asked = GenerateRequest.model_validate({"inputs": "", "parameters": {"grammar": {"type": kind, "value": value}}})
    with pytest.raises(ApiError, match=rf"grammar.value of type {kind} is"):
        completion_of(asked, stream=False)


def test_errors_have_its_shape() -> None:
    kinds = [error_body(ApiError(status, "x"))["error_type"] for status in (400, 401, 404, 413, 429, 500, 503)]
    wanted = ["validation", "authentication", "not_found", "validation", "overloaded", "generation", "unhealthy"]
    assert kinds == wanted


def test_a_text_and_its_details(client: TestClient, engine: Engine) -> None:
    (result,) = engine.generate([PROMPT], [SamplingParams(12, seed=0)])
    parameters = {"max_new_tokens": 12, "details": True, "return_full_text": True, "seed": 7}
    told = client.post("/generate", json={"inputs": PROMPT, "parameters": parameters}).json()
    assert told["generated_text"] == PROMPT + result.text
    details = told["details"]
    assert (details["finish_reason"], details["generated_tokens"], details["seed"]) == ("length", 12, 7)
    assert [token["id"] for token in details["tokens"]] == result.token_ids
    assert "".join(token["text"] for token in details["tokens"]) == result.text
    assert all(token["logprob"] <= 0 and token["special"] is False for token in details["tokens"])
    assert client.post("/generate", json={"inputs": PROMPT, "parameters": {"max_new_tokens": 3}}).json().keys() == {
        "generated_text"
    }


def test_the_last_tokens_of_a_prompt_count(client: TestClient, engine: Engine) -> None:
    (result,) = engine.generate([engine.encode(PROMPT)[-3:]], [SamplingParams(8, seed=0)])
    parameters = {"max_new_tokens": 8, "truncate": 3}
    told = client.post("/generate", json={"inputs": PROMPT, "parameters": parameters}).json()
    assert told["generated_text"] == result.text


@pytest.mark.parametrize("temperature", [None, 0.8])
def test_a_stream_has_an_event_for_each_token_and_the_last_has_the_text(
    client: TestClient, temperature: float | None
) -> None:
    parameters: dict[str, Any] = {"max_new_tokens": 24, "seed": 3, "details": True, "temperature": temperature}
    asked = {"inputs": PROMPT, "parameters": parameters}
    whole = client.post("/generate", json=asked).json()
    reply = client.post("/generate_stream", json=asked)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line.removeprefix("data: ")) for line in reply.text.split("\n\n") if line]
    assert [event["index"] for event in events] == list(range(1, 25))
    assert [event["token"] for event in events] == whole["details"]["tokens"]
    assert [event["generated_text"] for event in events] == [None] * 23 + [whole["generated_text"]]
    assert "".join(event["token"]["text"] for event in events) == whole["generated_text"]
    last = events[-1]["details"]
    assert (last["finish_reason"], last["generated_tokens"], last["seed"]) == ("length", 24, 3)
    assert last["input_length"] > 0


def test_a_stop_sequence_ends_it(client: TestClient) -> None:
    parameters = {"max_new_tokens": 40, "stop": ["\n"], "details": True}
    told = client.post("/generate", json={"inputs": "import os", "parameters": parameters}).json()
    assert told["details"]["finish_reason"] == "stop_sequence"
    assert "\n" not in told["generated_text"]
