"""The gate: ids, keys, bodies and clients, before any route."""

import asyncio

import pytest
from asgi import GONE, call, part, scope_of
from serving import Log

from specbuild.serve import limits
from specbuild.serve.http.middleware import Gate, path_of
from specbuild.serve.options import ServeOptions

START = {"type": "http.response.start", "status": 200, "headers": []}


async def echo(scope, receive, send):
    body = (await receive())["body"]
    await send(START)
    await send({"type": "http.response.body", "body": body})


def gate(*keys, app=echo, log=None, **more):
    return Gate(app, (log or Log()).ended, ServeOptions(api_keys=keys), **more)


def ask(gate, *messages, path="/x", send=None, **headers):
    """What a request's client is sent; after its messages it stays connected and silent."""
    return call(gate, scope_of("POST", path, **headers), messages or [part(b"")], send=send)


def status(*given, **more):
    return int(ask(*given, **more)[0]["status"])


def header(sent, name):
    return dict(sent[0]["headers"])[name.encode()].decode()


LARGEST = 8 << 20  # bytes of a body, as docs/reference/http.md says


@pytest.mark.parametrize("length", ["9" * 30, str(LARGEST + 1), "-1", "abc"])
def test_a_length_that_is_too_much_is_refused_unread(length):
    sent = ask(gate(), content_length=length)
    assert (sent[0]["status"], header(sent, "connection")) == (413, "close")


def test_bodies_and_headers_are_bounded():
    assert [status(gate(), part(bytes(LARGEST + more))) for more in (1, 0)] == [413, 200]
    assert status(gate(body_seconds=0.01), part(b"a", more=True)) == 408, "it never ends"
    assert status(gate(), x="y" * (64 << 10)) == 431


def test_large_bodies_share_a_room_and_small_ones_have_their_own():
    one = gate()
    one.body_bytes = limits.BODIES_BYTES
    large, small = part(bytes(limits.SMALL_BODY_BYTES + 1)), part(bytes(limits.SMALL_BODY_BYTES))
    assert [status(one, body) for body in (large, small)] == [429, 200]
    one.body_bytes = 0
    assert (status(one, large), one.body_bytes) == (200, 0)


def test_beyond_a_number_of_requests_probes_alone_are_answered():
    one = gate()
    one.requests = limits.CONNECTIONS
    assert [status(one, path=path) for path in ("/x", "/health/live")] == [503, 200]


def test_the_log_has_the_client_and_which_key_it_gave(log):
    for key in ("k1", "k2", "k1"):
        ask(gate("k1", "k2", log=log), authorization=f"Bearer {key}")
    ask(gate(log=log))
    found = [line["key"] for line in log.lines]
    assert (found[0] == found[2], len({*found}), found[3]) == (True, 3, None)
    assert "k1" not in str(log.lines)
    assert {line["client"] for line in log.lines} == {"127.0.0.1"}


def test_a_client_that_leaves_in_the_middle_of_its_body(log):
    assert ask(gate(log=log), part(b"a", more=True), GONE) == []
    assert log.lines[-1]["status"] == 499


@pytest.mark.parametrize("wanted", [200, 401])
def test_keys(wanted):
    given = {200: ("Bearer k1", "bearer  k2 "), 401: ("Bearer k3", "Basic k1", "k1")}[wanted]
    assert {status(gate("k1", "k2"), authorization=each) for each in given} == {wanted}
    paths = {200: "/health http://host:8000/health", 401: "/x /healthy /x/health http://host/x /http://host/health"}
    assert {status(gate("k1", "k2"), path=path) for path in paths[wanted].split()} == {wanted}


@pytest.mark.parametrize(
    ("path", "below"), [("/llm", "/"), ("/llm/", "/"), ("/llm/x", "/x"), ("/llmx", "/llmx"), ("/x", "/x")]
)
def test_a_path_below_the_root_path_begins_with_a_slash(path, below):
    assert path_of({"path": path, "root_path": "/llm"}) == below


@pytest.mark.parametrize("started", [False, True])
def test_a_bug_is_a_clean_error_and_a_line_in_the_log(log, started):
    async def app(scope, receive, send):
        if started:
            await send(START)
        raise KeyError("secret")

    if started:
        with pytest.raises(KeyError):  # the server closes the connection
            ask(gate(app=app, log=log))
    else:
        sent = ask(gate(app=app, log=log))
        assert (sent[0]["status"], b"secret" in sent[1]["body"]) == (500, False)
    assert "secret" in log.lines[-1]["error"]


def test_a_client_that_takes_nothing_is_cut_off(log):
    async def stuck(message):
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError if hasattr(asyncio, "timeout") else asyncio.TimeoutError):
        ask(gate(log=log, send_seconds=0.01), send=stuck)
    assert "took nothing" in log.lines[-1]["error"]
