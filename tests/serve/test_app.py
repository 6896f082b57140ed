"""The routes, from a client's side: OpenAI's shapes, the engine's texts, refusals that say what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from serving import Log

from specbuild.runtime import Chat, Engine, SamplingParams

ASKED: dict[str, Any] = {"prompt": "def main(", "max_tokens": 12, "temperature": 0}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a loop"}], "max_tokens": 12, "temperature": 0}


def events(client: TestClient, path: str, body: dict[str, Any]) -> list[Any]:
    with client.stream("POST", path, json=body | {"stream": True}) as reply:
        assert (reply.status_code, reply.headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def choices(client: TestClient, body: dict[str, Any], path: str = "/v1/completions") -> list[dict[str, Any]]:
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    told: list[dict[str, Any]] = reply.json()["choices"]
    return told


def test_a_completion_is_the_engines(client: TestClient, engine: Engine) -> None:
    (want,) = engine.generate("def main(", SamplingParams(max_new_tokens=12))
    reply = client.post("/v1/completions", json=ASKED | {"return_token_ids": True}).json()
    (choice,) = reply["choices"]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == (want.text, want.token_ids, "length")
    assert choice["prompt_token_ids"] == engine.encode("def main(")
    prompt = len(engine.encode("def main("))
    assert reply["usage"]["total_tokens"] == prompt + 12
    assert (reply["object"], reply["model"]) == ("text_completion", "pycode")
    assert reply["id"].startswith("cmpl-")


def test_a_chat_is_the_engines(client: TestClient, engine: Engine) -> None:
    (want,) = engine.generate(Chat(CHAT["messages"]), SamplingParams(max_new_tokens=12))
    (choice,) = choices(client, CHAT, "/v1/chat/completions")
    assert choice["message"] == {"role": "assistant", "content": want.text}
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "loop"}]
    (same,) = choices(client, CHAT | {"messages": [{"role": "user", "content": parts}]}, "/v1/chat/completions")
    assert same["message"] == choice["message"]
    (other,) = choices(client, CHAT | {"chat_template_kwargs": {"prefix": "class "}}, "/v1/chat/completions")
    assert other["message"] != choice["message"]


def test_streams_are_the_same_texts(client: TestClient) -> None:
    body = ASKED | {"n": 2, "temperature": 0.8, "seed": 3, "prompt": ["def main(", "import os"]}
    want = [choice["text"] for choice in choices(client, body)]
    texts = ["", "", "", ""]
    for event in events(client, "/v1/completions", body):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == want
    (whole,) = choices(client, CHAT, "/v1/chat/completions")
    deltas = [event["choices"][0]["delta"] for event in events(client, "/v1/chat/completions", CHAT)]
    assert "".join(delta.get("content", "") for delta in deltas) == whole["message"]["content"]
    assert [delta.get("role") for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]


def test_usage_of_a_stream(client: TestClient) -> None:
    assert all("usage" not in event for event in events(client, "/v1/completions", ASKED))
    body = ASKED | {"stream_options": {"include_usage": True}}
    told = events(client, "/v1/completions", body)
    assert [event["usage"] for event in told[:-1]] == [None] * (len(told) - 1)
    assert (told[-1]["choices"], told[-1]["usage"]["completion_tokens"]) == ([], 12)
    assert told[-1]["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    counts = [event["usage"]["completion_tokens"] for event in events(client, "/v1/completions", body)]
    assert counts == sorted(counts)
    assert counts[-2:] == [12, 12]


def test_a_tiny_temperature_is_greedy(client: TestClient) -> None:
    greedy, tiny = (choices(client, ASKED | {"temperature": temperature, "n": 2}) for temperature in (0, 1e-6))
    assert [each["text"] for each in tiny] == [each["text"] for each in greedy]


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_speculation_changes_no_text(client: TestClient, temperature: float) -> None:
    ways: list[dict[str, Any]] = [
        *({"speculation": way} for way in ("off", "auto", "chain:4", "best:8")),
        {"disable_spec_decode": True},
        {"num_speculative_tokens": 3},
    ]
    body = ASKED | {"temperature": temperature, "seed": 5, "max_tokens": 32}
    told = [choices(client, body | way)[0] for way in ways]
    assert len({choice["text"] for choice in told}) == 1
    steps = [choice["metrics"]["speculative_decoding"]["num_spec_steps"] for choice in told]
    assert (steps[0], steps[4]) == (0, 0)
    assert min(steps[2], steps[3], steps[5]) > 0


def test_greedy_samples_are_equal(client: TestClient) -> None:
    texts = [choice["text"] for choice in choices(client, ASKED | {"n": 3})]
    assert len(texts) == 3
    assert len({*texts}) == 1


def test_logprobs_of_a_completion(client: TestClient, engine: Engine) -> None:
    (choice,) = choices(client, ASKED | {"logprobs": 2, "echo": True, "max_tokens": 4})
    told = choice["logprobs"]
    prompt = engine.encode("def main(")
    assert "".join(told["tokens"]) == choice["text"]
    assert {len(each) for each in told.values()} == {len(prompt) + 4}
    assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
    for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)
    (want,) = engine.generate("def main(", SamplingParams(max_new_tokens=4, logprobs=2))
    assert told["token_logprobs"][len(prompt) :] == [each.logprob for each in want.logprobs or []]
    streamed = events(client, "/v1/completions", ASKED | {"logprobs": 2, "echo": True, "max_tokens": 4})
    parts = [event["choices"][0]["logprobs"] for event in streamed]
    for name, whole in told.items():
        assert [each for part in parts if part for each in part[name]] == whole


def test_logprobs_of_a_chat(client: TestClient) -> None:
    (choice,) = choices(client, CHAT | {"logprobs": True, "top_logprobs": 3}, "/v1/chat/completions")
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(each["bytes"]) for each in content).decode() == choice["message"]["content"]
    assert all(each["top_logprobs"][0]["token"] == each["token"] for each in content)
    assert {len(each["top_logprobs"]) for each in content} == {3}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": ""}, "prompt", "empty"),
        ({}, "prompt", "required"),
        ({"prompt": "x", "colour": 1}, "colour", "unknown"),
        ({"prompt": "x", "n": 0}, "n", "1"),
        ({"prompt": "x", "temperature": 101}, "temperature", "100"),
        ({"prompt": "x", "suffix": "y"}, "suffix", "not supported"),
        ({"prompt": "x", "best_of": 3}, "best_of", "not supported"),
        ({"prompt": "x", "speculation": "sideways"}, "speculation", "tree"),
        ({"prompt": "x", "speculation": "best:4096"}, "speculation", "best:4096"),
        ({"prompt": "x", "num_speculative_tokens": 4096}, "num_speculative_tokens", "chain:4096"),
        ({"prompt": "x", "stop": ["x"] * 65}, "stop", "64"),
        ({"prompt": "x", "stop": ["x" * 3000] * 2}, "stop", "4,096"),
        ({"prompt": "x", "stop": "\ud800"}, "stop", "Unicode"),
        ({"prompt": ["x", 1]}, "prompt", "not mixed"),
        ({"prompt": "x", "logit_bias": {"9999999999": 1}}, "logit_bias", "token id"),
        ({"prompt": "x", "structured_outputs": {"regex": "a("}}, "structured_outputs", "regex"),
        ({"prompt": "x", "structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"prompt": "x", "structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "ignore_eos"),
        ({"prompt": "x", "response_format": {"type": "json_schema"}}, "response_format", "schema"),
        ({"prompt": "x" * 9000}, "prompt", "tokens"),
        ({"prompt": "x", "max_tokens": 5000}, "max_tokens", "room"),
        ({"prompt": "\ud800"}, "prompt", "Unicode"),
        ({"prompt": ["x"] * 3, "n": 128}, "n", "samples"),
        ({"prompt": "x", "stream_options": {}}, "stream_options", "stream"),
        ({"prompt": [10**6]}, "prompt", "vocabulary"),
        ({"prompt": "x", "min_tokens": 20}, "min_tokens", "16"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals(client: TestClient, body: dict[str, Any], param: str | None, words: str, stream: bool) -> None:
    if "stream_options" not in body:
        body = body | {"stream": stream}
    reply = client.post("/v1/completions", content=json.dumps(body), headers={"Content-Type": "application/json"})
    told = reply.json()["error"]
    assert (reply.status_code, told["param"], told["type"]) == (400, param, "invalid_request_error")
    assert words.lower() in told["message"].lower()
    assert client.service.models.all[0].admission.samples == 0  # type: ignore[attr-defined]


def test_more_prompts_than_there_is_room_for(make_client: Callable[..., TestClient]) -> None:
    reply = make_client(max_waiting=1).post("/v1/completions", json={"prompt": ["x"] * 30})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt")


SAID: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
BAD_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "colour"}, "strict": True}}
BAD_SCHEMA = {"type": "json_schema", "name": "s", "schema": {"type": "colour"}}
LONG = "x " * 3000


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages", "tokens"),
        ("/v1/chat/completions", {"messages": SAID, "chat_template_kwargs": {"messages": 1}}, None, "template"),
        (
            "/v1/chat/completions",
            {"messages": SAID, "tools": [BAD_TOOL]},
            "tools",
            "",
        ),
        (
            "/v1/chat/completions",
            {"messages": SAID, "n": 1, "stop": [""]},
            None,
            "1",
        ),
        ("/v1/chat/completions", {"messages": SAID, "max_completion_tokens": 5000}, "max_completion_tokens", "5000"),
        ("/v1/responses", {"input": LONG}, "input", "tokens"),
        ("/v1/responses", {"input": "x", "max_output_tokens": 5000}, "max_output_tokens", "max_output_tokens is 5000"),
        ("/v1/responses", {"input": "x", "text": {"format": BAD_SCHEMA}}, "text.format", "text.format cannot"),
        ("/v1/responses", {"input": "x", "temperature": 101}, "temperature", "100"),
        ("/v1/responses", {"input": "x", "previous_response_id": "nothing"}, "previous_response_id", "nothing"),
        ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}, "messages", "tokens"),
        ("/tokenize", {"prompt": LONG}, "prompt", "tokens"),
        ("/invocations", {"prompt": "x", "n": 0}, "n", "1"),
        ("/invocations", {}, "inputs", "inputs, messages or prompt"),
        ("/predict", {"instances": []}, "instances", "1 item"),
    ],
)
def test_refusals_elsewhere(client: TestClient, path: str, body: dict[str, Any], param: str | None, words: str) -> None:
    """Other routes translate their requests, and errors name the caller's own fields; None: the last of the body."""
    reply = client.post(path, json=body)
    told = reply.json()["error"]
    assert (reply.status_code // 100, told["param"].partition(".0")[0]) == (4, param or list(body)[-1]), told
    assert words in told["message"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/messages", {"max_tokens": 4, "messages": SAID, "stop_sequences": [""]}, "stop_sequences.0: "),
        ("/v1/messages", {"max_tokens": 4, "messages": SAID, "stop_sequences": [LONG]}, "stop_sequences has 6,000"),
        ("/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": 5}]}, "messages.0.content: "),
        ("/generate", {"inputs": "x", "parameters": {"stop": ["x" * 5000]}}, "parameters.stop has 5,000"),
        ("/generate", {"inputs": "x", "parameters": {"max_new_tokens": 5000}}, "parameters.max_new_tokens is 5000"),
        ("/generate", {"inputs": 5}, "inputs: "),
    ],
)
def test_shapes_of_errors_without_a_field_begin_with_it(client: TestClient, path: str, body: Any, words: str) -> None:
    reply = client.post(path, json=body)
    told = reply.json()["error"]
    assert reply.status_code == 400
    assert (told if isinstance(told, str) else told["message"]).startswith(words)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 2, "store": None}),
        ("/v1/chat/completions", CHAT | {"store": None, "service_tier": None, "audio": None, "functions": None}),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": "x", "mood": None}]}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 2, "reasoning": None, "conversation": None}),
        ("/v1/messages", {"messages": SAID, "max_tokens": 2, "thinking": None, "container": None}),
        ("/generate", {"inputs": "x", "parameters": {"max_new_tokens": 2, "colour": None}}),
        ("/invocations", {"inputs": None, "messages": None, "prompt": "x", "max_tokens": 2, "store": None}),
        ("/predict", {"instances": None, "prompt": "x", "max_tokens": 2}),
        ("/predict", {"instances": [{"inputs": None, "prompt": "x", "n": None}], "parameters": {"max_tokens": 2}}),
        ("/tokenize", {"prompt": "x", "messages": None, "colour": None}),
        ("/detokenize", {"tokens": [5], "colour": None}),
    ],
)
def test_null_for_a_field_that_nothing_reads_is_none(client: TestClient, path: str, body: dict[str, Any]) -> None:
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        (b"{", "application/json", "JSON"),
        (b"[" * 10**5, "application/json", "body"),
        (b"a=1", "text/plain", "Content-Type"),
    ],
)
def test_bodies_that_are_no_json(client: TestClient, content: bytes, kind: str, words: str) -> None:
    reply = client.post("/v1/completions", content=content, headers={"Content-Type": kind})
    assert reply.status_code == 400
    assert words in reply.json()["error"]["message"]


def test_parts_that_are_no_text_are_named(client: TestClient) -> None:
    parts = [{"type": "image_url", "image_url": {"url": "x"}}]
    reply = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": parts}]})
    assert (reply.status_code, "text" in reply.json()["error"]["message"]) == (400, True)


def test_sloppy_clients(make_client: Callable[..., TestClient]) -> None:
    client = make_client(extra_fields="ignore")
    body = CHAT | {"colour": 1, "messages": [{"role": "user", "content": "a loop", "mood": 1}]}
    assert choices(client, body, "/v1/chat/completions") != []


def test_a_model_that_is_not_there(client: TestClient) -> None:
    reply = client.post("/v1/completions", json=ASKED | {"model": "gpt"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
    assert client.post("/v1/completions", json=ASKED | {"model": "alias"}).json()["model"] == "pycode"
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["pycode", "alias"]
    assert client.get("/v1/models/alias").json()["max_model_len"] == 1024


def test_tokens_there_and_back(client: TestClient, engine: Engine) -> None:
    told = client.post("/tokenize", json={"prompt": "def main(", "return_token_strs": True}).json()
    assert told["tokens"] == engine.encode("def main(")
    assert (told["count"], "".join(told["token_strs"])) == (len(told["tokens"]), "def main(")
    assert client.post("/detokenize", json={"tokens": told["tokens"]}).json() == {"prompt": "def main("}
    chat = client.post("/tokenize", json={"messages": CHAT["messages"]}).json()
    assert chat["tokens"] == engine.encode(Chat(CHAT["messages"]))
    for body in ({}, {"prompt": "x", "messages": CHAT["messages"]}):
        assert client.post("/tokenize", json=body).status_code == 400
    assert client.post("/detokenize", json={"tokens": [10**6]}).status_code == 400


def test_keys_open_all_but_health(make_client: Callable[..., TestClient]) -> None:
    client = make_client(api_keys=("one", "two"))
    for path in ("/v1/models", "/metrics", "/load", "/version", "/openapi.json"):
        assert client.get(path).status_code == 401
        assert client.get(path, headers={"Authorization": "Bearer three"}).status_code == 401
        assert client.get(path, headers={"Authorization": "Bearer two"}).status_code == 200
    for path in ("/health", "/health/live", "/health/ready"):
        assert client.get(path).status_code == 200
    assert client.get("/healthy").status_code == 401


def test_caches_are_apart_by_key(make_client: Callable[..., TestClient]) -> None:
    prompt = "import sys\nimport json\n" * 8

    def cached(client: TestClient, key: str, **fields: Any) -> int:
        body = ASKED | {"prompt": prompt, "max_tokens": 1} | fields
        reply = client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}).json()
        told: int = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        return told

    client = make_client(api_keys=("a", "b"))
    assert cached(client, "a") == 0
    assert cached(client, "a") > 0
    assert cached(client, "b") == 0
    assert cached(client, "a", cache_salt="mine") == 0
    sharing = make_client(api_keys=("a", "b"), share_prefix_cache=True)
    assert cached(sharing, "a") == 0
    assert cached(sharing, "b") > 0


def test_a_full_queue_and_a_draining_server(client: TestClient) -> None:
    admission = client.service.models.all[0].admission  # type: ignore[attr-defined]
    with admission.room(admission.max_samples):
        reply = client.post("/v1/completions", json=ASKED)
    assert (reply.status_code, int(reply.headers["retry-after"]) >= 1) == (429, True)
    client.service.drain()  # type: ignore[attr-defined]
    reply = client.post("/v1/completions", json=ASKED)
    assert (reply.status_code, "retry-after" in reply.headers) == (503, True)
    assert (client.get("/health/ready").status_code, client.get("/health/live").status_code) == (503, 200)
    assert client.get("/health/ready").json()["models"] == {"pycode": "draining"}
    told = {family.name: family for family in text_string_to_metric_families(client.get("/metrics").text)}
    reasons = {each.labels["reason"]: each.value for each in told["specbuild:admission_rejections"].samples}
    assert {"queue_full", "draining"} <= reasons.keys()


def test_deadlines(make_client: Callable[..., TestClient]) -> None:
    reply = make_client(request_timeout=1e-6).post("/v1/completions", json=ASKED)
    assert (reply.status_code, reply.json()["error"]["code"]) == (408, "deadline")
    (cut,) = choices(make_client(), ASKED | {"max_tokens": 900, "ignore_eos": True, "deadline": 0.3})
    assert (cut["finish_reason"], cut["stop_reason"]) == ("length", "deadline")


def test_request_ids_and_the_log(client: TestClient, log: Log) -> None:
    reply = client.post("/v1/completions", json=ASKED | {"user": "u"}, headers={"X-Request-Id": "abc"})
    assert (reply.headers["x-request-id"], reply.json()["id"]) == ("abc", "cmpl-abc")
    line = log.lines[-1]
    assert (line["request_id"], line["status"], line["model"], line["user"]) == ("abc", 200, "pycode", "u")
    assert (line["output_tokens"], line["finish_reason"]) == (12, "length")
    assert "def main" not in json.dumps(log.lines)
    assert client.post("/v1/completions", json=ASKED | {"request_id": "own"}).json()["id"] == "cmpl-own"
    assert len(client.get("/version", headers={"X-Request-Id": "two words"}).headers["x-request-id"]) == 32


@pytest.mark.parametrize(("how", "names"), [("none", None), ("summary", 7), ("detailed", 9)])
def test_metrics_of_a_request(make_client: Callable[..., TestClient], how: str, names: int | None) -> None:
    reply = make_client(spec_metrics=how).post("/v1/completions", json=ASKED).json()
    for told in (reply, reply["choices"][0]):
        assert ("metrics" in told) == (names is not None)
        if names:
            assert len(told["metrics"]["speculative_decoding"]) == names
            assert told["metrics"]["ttft"] > 0


def test_receipts_prove_texts(client: TestClient, engine: Engine, bundle: Path) -> None:
    from specbuild.runtime import Receipt

    body = ASKED | {"temperature": 0.8, "n": 2, "seed": 9, "receipt": True}
    for choice in choices(client, body):
        replay = engine.replay(Receipt.from_dict(choice["receipt"]), "def main(")
        assert replay.proven
    streamed = events(client, "/v1/completions", body)
    ends = [event["choices"][0] for event in streamed if event["choices"][0]["finish_reason"]]
    assert {end["receipt"]["seed"] for end in ends} == {9, 10}


def test_a_page_of_another_origin(make_client: Callable[..., TestClient]) -> None:
    client = make_client(allowed_origins=("https://here.example",), api_keys=("k",))
    asked = {"Origin": "https://here.example", "Access-Control-Request-Method": "POST"}
    assert client.options("/v1/completions", headers=asked).headers["access-control-allow-origin"] == asked["Origin"]
    asked["Origin"] = "https://there.example"
    assert "access-control-allow-origin" not in client.options("/v1/completions", headers=asked).headers
