"""Answers: what streams say of each token, and what is logged and traced of a request, however it ended."""

from __future__ import annotations

import json
from concurrent.futures import wait
from dataclasses import replace
from threading import Event

import pytest
from asgi import GONE, Message, call, part, scope_of
from route_client import ASKED, COMPLETIONS, RouteClient

from specbuild.runtime.decoding.emission import Emission
from specbuild.serve.request.generation import EventStream

PLAIN = {"speculation": "off"}


@pytest.mark.slow
def test_each_token_says_whether_it_was_drafted(client):
    fields = {"max_tokens": 40, "ignore_eos": True, "return_token_sources": True}
    drafted = fields | {"speculation": "chain:4"}
    client.ask(**drafted)  # its prompt is in the cache from here on, which changes what is drafted
    sources, counts = client.choice(**drafted)["token_sources"], client.ask(**drafted)["metrics"]
    assert "".join(each["text"] for each in sources) == client.choice(**drafted)["text"]
    accepted = counts["speculative_decoding"]["num_accepted_draft_tokens"]
    assert sum(each["drafted"] for each in sources) == accepted > 0
    assert not any(each["drafted"] for each in client.choice(**fields, **PLAIN)["token_sources"])
    assert not client.choice()["token_sources"]


@pytest.mark.slow
def test_a_stream_is_logged_when_it_has_ended(make_client, log):
    """Prompts and texts are in the log where that is asked for."""
    client = make_client(log_requests=True)
    text, _ = client.ask()["choices"][0]["text"], client.events()
    for line in log.lines:
        assert {"status": 200, "output_tokens": 12, "finish_reason": "length"}.items() <= line.items()
        assert line["ttft"] > 0
        assert line["draft_tokens"] >= line["accepted_tokens"]
        assert (json.loads(line["prompt"])["prompt"], json.loads(line["text"])) == ("def main(", [text])


class Span:
    """What a trace is told."""

    def __init__(self):
        self.ends: list[tuple[int, str | None]] = []

    def begin(self, *told):
        return self

    def end(self, prompt_tokens, results, error):
        self.ends.append((prompt_tokens, error))


@pytest.fixture
def span(client):
    span = Span()
    object.__setattr__(client.service, "traces", span)
    return span


def rejections(client):
    return [name for name in client.series() if name.startswith("specbuild:admission_rejections_total")]


@pytest.fixture
def fails_after(monkeypatch):
    """`fails_after(count)`: the model's own fault after so many tokens, once a response has begun."""
    note, begun = Emission.note, Event()

    def begin(events):
        begun.set()
        return EventStream(events)

    def fail(count):
        left = [count]

        def broken(self, *given):
            left[0] -= 1
            if left[0] < 0:
                assert not count or begun.wait(60), "no response begins"
                raise ValueError("planted")
            note(self, *given)

        monkeypatch.setattr(Emission, "note", broken)

    monkeypatch.setattr("specbuild.serve.handle_request.EventStream", begin)
    return fail


def test_a_fault_before_the_first_token_is_a_status(client, fails_after):
    fails_after(0)
    for stream in (False, True):
        status, error = client.refusal(COMPLETIONS, prompt="x", stream=stream)
        assert (status, "planted" in error["message"]) == (500, True)
    assert client.admission.requests == 0


@pytest.mark.parametrize(
    ("path", "fields"), [(COMPLETIONS, {"max_tokens": 40}), ("/generate_stream", {"inputs": "def main("})]
)
def test_a_fault_amid_a_stream_is_an_event_and_is_logged_and_traced(client, log, span, fails_after, path, fields):
    fails_after(20)
    *_, last = client.events(path, **fields)
    assert "planted" in str(last["error"])
    assert (log.lines[-1]["status"], "planted" in log.lines[-1]["error"]) == (200, True)
    assert (span.ends, rejections(client)) == ([(3, "500")], [])


@pytest.mark.parametrize(("prompt", "last"), [("x", b"[DONE]"), ("x " * 3000, b"context_length_exceeded")])
def test_a_stream_that_waits_has_its_headers_and_pings_and_then_its_events(client, log, prompt, last):
    """A proxy cuts off what is silent for a minute, as a stream in the queue would be. A late fault is an event."""
    client = RouteClient(replace(client.service, first_event_seconds=0.01, ping_seconds=0.01), log)
    free, sent = Event(), list[Message]()
    held = [client.service.pool.submit(free.wait) for _ in range(2)]

    async def send(message):
        sent.append(message)
        if len(sent) > 3:
            free.set()

    body = json.dumps({"prompt": prompt, "stream": True, "max_tokens": 2}).encode()
    try:
        call(client.app, scope_of("POST", COMPLETIONS, content_type="application/json"), [part(body)], send=send)
    finally:
        free.set()
        wait(held)
    assert sent[0]["status"] == 200
    assert [message["body"] for message in sent[1:4]] == [b": ping\n\n"] * 3
    assert last in sent[-2]["body"]
    assert client.admission.requests == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_no_error_of_ours(client, log, span, stream):
    fields = {"stream": stream, "max_tokens": 900, "ignore_eos": True}
    body = part(json.dumps(ASKED[COMPLETIONS] | fields).encode())
    scope = scope_of("POST", COMPLETIONS, content_type="application/json")
    call(client.app, scope, [body] if stream else [body, GONE], leaves=True)
    assert (log.lines[-1]["status"], log.lines[-1]["error"]) == (200 if stream else 499, "the client left")
    assert [error for _, error in span.ends] == ["499"]
    assert (client.admission.requests, rejections(client)) == (0, [])
