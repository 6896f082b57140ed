"""Limits by key: each has its own, says what is left, and is refused beyond it."""

import pytest
from route_client import ASKED, COMPLETIONS

pytest.importorskip("limits", reason="limits is not installed")


def asked(client, key, **fields):
    return client.post(COMPLETIONS, json=ASKED[COMPLETIONS] | fields, headers={"Authorization": f"Bearer {key}"})


@pytest.mark.parametrize("stream", [False, True])
def test_requests_of_a_key(make_client, stream):
    client = make_client(api_keys=("a", "b"), requests_per_minute=2)
    replies = [asked(client, key, stream=stream, max_tokens=1) for key in "aaab"]
    assert [reply.status_code for reply in replies] == [200, 200, 429, 200]
    assert [reply.headers["x-ratelimit-remaining-requests"] for reply in replies] == [*"1001"]
    refused = replies[2]
    assert (refused.json()["error"]["code"], refused.json()["error"]["type"]) == ("requests_per_minute", "requests")
    assert 0 < int(refused.headers["retry-after"]) <= 60
    assert refused.headers["x-ratelimit-limit-requests"] == "2"
    assert client.admission.requests == 0


def test_tokens_of_a_key(make_client):
    client = make_client(api_keys=("a", "b"), tokens_per_minute=12)
    replies = [asked(client, key) for key in "aab"]
    assert [reply.status_code for reply in replies] == [200, 429, 200]
    assert replies[1].json()["error"]["type"] == "tokens"
    assert replies[1].headers["x-ratelimit-remaining-tokens"] == "0"


def test_without_limits_there_are_no_headers(client):
    assert not [name for name in asked(client, "").headers if name.startswith("x-ratelimit")]
