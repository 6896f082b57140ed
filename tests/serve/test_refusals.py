"""What the routes refuse: one line each, that names the caller's own field; and null is no field."""

import json
import random
import re

import pytest
from campaign.attack import Bench
from campaign.http import HttpAttack
from data_files import rows
from hypothesis import given, settings
from hypothesis import strategies as st
from route_client import CHATS, COMPLETIONS, MESSAGES, RESPONSES, SAID

LONG = "x " * 3000


@pytest.fixture(scope="module")
def attack(bundle, tmp_path_factory):
    place = tmp_path_factory.mktemp("attack")
    attack = HttpAttack(Bench(bundle, place))
    yield attack
    attack.close()


@pytest.mark.slow
@settings(max_examples=150)
@given(seed=st.integers(0, 2**32))
def test_any_field_with_any_value_is_taken_or_refused_by_its_name(attack, seed):
    attack.attempt(random.Random(seed), attack.bench.home)


BASE = {
    **{COMPLETIONS: {"prompt": "x"}, CHATS: {"messages": SAID}, RESPONSES: {"input": "x"}},
    **{
        MESSAGES: {"messages": SAID, "max_tokens": 4},
        "/generate": {"inputs": "x"},
        "/generate_stream": {"inputs": "x"},
    },
}
WRONG = {  # the last field of each is to blame
    COMPLETIONS: [{"prompt": LONG * 2}],
    **{CHATS: [{"messages": [{"role": "user", "content": LONG}]}], RESPONSES: [{"input": LONG}]},
    **{"/generate": [{"parameters": {"stop": [LONG]}}], "/tokenize": [{"prompt": LONG}]},
}
for text in (json.dumps({"d": LONG * 50}), '{"items":' * 500 + "{}" + "}" * 500):
    WRONG[CHATS].append({"structured_outputs": {"json": text}})
for line in rows("wrong_bodies.jsonl"):
    WRONG.setdefault(line["path"], []).append(line["fields"])


@pytest.mark.parametrize("path", WRONG)
def test_what_is_wrong_together_or_for_this_model(make_client, path):
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


HALF_CHARACTERS = [b'{"stop": "\\ud800"}', b'{"stop": "\xff"}']


@pytest.mark.parametrize("kind", ["application/json", "text/plain"])
@pytest.mark.parametrize(
    "content", [b"\x15\xf0", b"{", b"[]", b"", b"[" * 10**5, b'{"stop": "\\ud800"}', b'{"stop": "\xff"}']
)
@pytest.mark.parametrize("path", [COMPLETIONS, MESSAGES])
def test_a_body_that_is_no_json(client, path, content, kind):
    reply = client.post(path, content=content, headers={"Content-Type": kind})
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")


def test_more_prompts_than_there_is_room_for(make_client):
    assert make_client(max_waiting=1).refusal(COMPLETIONS, prompt=["x"] * 30)[1]["param"] == "prompt"


def test_a_model_that_is_not_there(client):
    status, error = client.refusal(COMPLETIONS, prompt="x", model="gpt")
    assert (status, error["code"]) == (404, "model_not_found")
    status, error = client.refusal(MESSAGES, messages=SAID, max_tokens=1, model="gpt")
    assert (status, error["type"]) == (404, "not_found_error")
