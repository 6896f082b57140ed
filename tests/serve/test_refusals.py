"""What the routes refuse: one line each, that names the caller's own field; and null is no field."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from campaign.attack import Bench
from campaign.http import HttpAttack
from hypothesis import given, settings
from hypothesis import strategies as st
from route_client import CHATS, COMPLETIONS, MESSAGES, RESPONSES, SAID, SCHEMA, RouteClient

BAD = {"type": "colour"}
TOOL, BAD_TOOL = (
    {"type": "function", "function": {"name": "f", "parameters": each, "strict": True}} for each in (SCHEMA, BAD)
)
OF_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
STRUCTURES: list[dict[str, Any]] = [
    *({}, {"regex": "a("}, {"regex": "a", "whitespace_pattern": " "}, {"regex": "a", "choice": ["b"]}, {"json": BAD}),
    *({"json": {"not": {"type": "string"}}}, {"json": {"$ref": "https://example.com/a.json"}}, {"json": {"$ref": "#"}}),
    *({"json": {"enum": []}}, {"json": json.dumps({"d": "x" * 300_000})}, {"grammar": "start: nothing"}),
    *({"json": '{"items":' * 500 + "{}" + "}" * 500}, {"json_object": True, "after": "</nothing>"}),
]
LONG = "x " * 3000
IMAGE, EMPTY, USED = (
    {"role": "user", "content": [part]}
    for part in (
        {"type": "image_url", "image_url": {"url": "x"}},
        {"type": "text"},
        {"type": "tool_use", "id": "1", "name": "f", "input": {}},
    )
)


@pytest.fixture(scope="module")
def attack(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpAttack]:
    place = tmp_path_factory.mktemp("attack")
    attack = HttpAttack(Bench(bundle, place))
    yield attack
    attack.close()


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 2**32))
def test_any_field_with_any_value_is_taken_or_refused_by_its_name(attack: HttpAttack, seed: int) -> None:
    attack.attempt(random.Random(seed), attack.bench.home)


BASE: dict[str, dict[str, Any]] = {
    **{COMPLETIONS: {"prompt": "x"}, CHATS: {"messages": SAID}, RESPONSES: {"input": "x"}},
    **{
        MESSAGES: {"messages": SAID, "max_tokens": 4},
        "/generate": {"inputs": "x"},
        "/generate_stream": {"inputs": "x"},
    },
}
WRONG: dict[str, list[dict[str, Any]]] = {  # the last field of each is to blame
    COMPLETIONS: [
        *({"prompt": ""}, {"prompt": None}, {"prompt": "x" * 9000}, {"prompt": [10**6]}, {"suffix": "y"}),
        *({"prompt": ["x"] * 3, "n": 128}, {"best_of": 3}, {"speculation": "best:4096"}, {"max_tokens": 5000}),
        *({"num_speculative_tokens": 4096}, {"disable_spec_decode": True, "speculation": "auto"}, {"stop": "\ud800"}),
        *({"logit_bias": {"9999999999": 1}}, {"structured_outputs": {"regex": "a"}, "ignore_eos": True}),
        *({"stream": False, "stream_options": {}}, {"min_tokens": 20}),
    ],
    CHATS: [
        *({"messages": [{"role": "user", "content": LONG}]}, {"messages": [IMAGE]}, {"max_completion_tokens": 5000}),
        *({"chat_template_kwargs": {"messages": 1}}, {"max_completion_tokens": 1, "max_tokens": 1}),
        *({"top_logprobs": 2}, {"response_format": {"type": "json_schema"}}, {"tool_choice": "required"}),
        *({"structured_outputs": {"regex": "a"}, "response_format": OF_SCHEMA}, {"tools": [TOOL, TOOL]}),
        *({"tools": [TOOL], "tool_choice": "required", "response_format": OF_SCHEMA}, {"tools": [BAD_TOOL]}),
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        *({"structured_outputs": each} for each in STRUCTURES),
    ],
    RESPONSES: [
        *({"input": LONG}, {"input": [{"type": "function_call", "name": "f"}]}, {"input": [{"content": "x"}]}),
        *({"stream": True, "background": True}, {"include": ["x"]}, {"tools": [{"type": "web_search"}]}),
        *({"text": {"format": {"type": "json_schema", "name": "s", "schema": BAD}}}, {"previous_response_id": "none"}),
    ],
    MESSAGES: [
        *(
            {"stop_sequences": [""]},
            {"tool_choice": {"type": "tool"}},
            {"tools": [{"type": "web_search_1", "name": "w"}]},
        ),
        *({"messages": [said]} for said in (IMAGE, EMPTY, USED, {"role": "system", "content": "x"})),
    ],
    f"{MESSAGES}/count_tokens": [{"messages": []}, {"messages": SAID, "colour": "red"}],
    "/generate": [{"parameters": {"stop": ["x" * 5000]}}, {"parameters": {"max_new_tokens": 5000}}],
    "/generate_stream": [{"parameters": {"max_new_tokens": 5000}}, {"parameters": {"colour": 0}}],
    "/": [{"inputs": 5}, {"inputs": "x", "parameters": {"max_new_tokens": 5000}}],
    "/tokenize": [{"prompt": LONG}, {"messages": SAID, "prompt": "x"}],
    "/detokenize": [{"tokens": [10**6]}],
    "/invocations": [{"inputs": None}],
    "/predict": [{"instances": []}, {"instances": [{"inputs": "x"}], "colour": 1}],
    "/ui/line": [{"line": ""}, {"line": "/dance"}, {"line": "x", "said": [{"role": "system", "content": "y"}]}],
}


@pytest.mark.parametrize("path", WRONG)
def test_what_is_wrong_together_or_for_this_model(make_client: Callable[..., RouteClient], path: str) -> None:
    """An error that has no place for a field begins with it."""
    client = make_client(ui=True)
    for fields in WRONG[path]:
        for stream in (False, True) if path in (COMPLETIONS, CHATS) else (None,):
            status, error = client.refusal(path, **{"stream": stream} | BASE.get(path, {}) | fields)
            assert status in (400, 404), error
            message = error if isinstance(error, str) else error["message"]
            has_place = message is not error and "param" in error
            named = error["param"] if has_place else message.removeprefix("unknown field '")
            assert re.match(rf"{[*fields][-1]}\b", named or ""), error
            assert "\n" not in message
            assert len(message) < 1000
            assert client.admission.samples == 0


@pytest.mark.parametrize("kind", ["application/json", "text/plain"])
@pytest.mark.parametrize("content", [b"\x15\xf0", b"{", b"[]", b"", b"[" * 10**5])
@pytest.mark.parametrize("path", [COMPLETIONS, MESSAGES])
def test_a_body_that_is_no_json(client: RouteClient, path: str, content: bytes, kind: str) -> None:
    reply = client.post(path, content=content, headers={"Content-Type": kind})
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")


def test_more_prompts_than_there_is_room_for(make_client: Callable[..., RouteClient]) -> None:
    assert make_client(max_waiting=1).refusal(COMPLETIONS, prompt=["x"] * 30)[1]["param"] == "prompt"


def test_a_model_that_is_not_there(client: RouteClient) -> None:
    status, error = client.refusal(COMPLETIONS, prompt="x", model="gpt")
    assert (status, error["code"]) == (404, "model_not_found")
    status, error = client.refusal(MESSAGES, messages=SAID, max_tokens=1, model="gpt")
    assert (status, error["type"]) == (404, "not_found_error")
