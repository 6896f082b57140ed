"""The gate: ids, keys, bodies and clients, before any route."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from serving import Log

from specbuild.serve import limits
from specbuild.serve.gate import Gate

Message = dict[str, Any]


async def echo(scope: Any, receive: Any, send: Any) -> None:
    body = (await receive())["body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


def ask(
    gate: Gate,
    *messages: Message,
    path: str = "/x",
    headers: dict[str, str] | None = None,
    send: Any = None,
    method: str = "POST",
) -> list[Message]:
    """What a request's client is sent; after its messages it stays connected and silent."""
    sent, left = list[Message](), list(messages or [{"type": "http.request", "body": b"", "more_body": False}])

    async def receive() -> Message:
        if left:
            return left.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    async def keep(message: Message) -> None:
        sent.append(message)

    raw = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "headers": raw}
    asyncio.run(gate(scope, receive, send or keep))
    return sent


def header(sent: list[Message], name: str) -> str:
    return dict(sent[0]["headers"])[name.encode()].decode()


def part(body: bytes, more: bool = False) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_body_comes_whole() -> None:
    sent = ask(Gate(echo, Log()), part(b"a", more=True), part(b"b"))
    assert sent[1]["body"] == b"ab"
    assert len(header(sent, "x-request-id")) == 32


@pytest.mark.parametrize("length", ["9" * 30, str(limits.BODY_BYTES + 1), "-1", "abc"])
def test_a_length_that_is_too_much_is_refused_unread(length: str) -> None:
    sent = ask(Gate(echo, Log()), headers={"content-length": length})
    assert (sent[0]["status"], header(sent, "connection")) == (413, "close")


def test_a_body_that_does_not_say_how_long_it_is_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_BYTES", 3)
    assert ask(Gate(echo, Log()), part(b"abcd"))[0]["status"] == 413
    assert ask(Gate(echo, Log()), part(b"abc"))[0]["status"] == 200


def test_a_body_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.01)
    assert ask(Gate(echo, Log()), part(b"a", more=True))[0]["status"] == 408


def test_a_client_that_leaves_in_the_middle_of_its_body() -> None:
    log = Log()
    assert ask(Gate(echo, log), part(b"a", more=True), {"type": "http.disconnect"}) == []
    assert log.lines[-1]["status"] == 499


def test_headers_are_bounded() -> None:
    assert ask(Gate(echo, Log()), headers={"x": "y" * limits.HEADER_BYTES})[0]["status"] == 431


@pytest.mark.parametrize(
    ("path", "given", "status"),
    [
        ("/x", "Bearer k1", 200),
        ("/x", "bearer  k2 ", 200),
        ("/x", "Bearer k3", 401),
        ("/x", "Basic k1", 401),
        ("/x", "k1", 401),
        ("/x", "", 401),
        ("/health", "", 200),
        ("/health/live", "", 200),
        ("/healthy", "", 401),
        ("/x/health", "", 401),
    ],
)
def test_keys(path: str, given: str, status: int) -> None:
    headers = {"authorization": given} if given else {}
    assert ask(Gate(echo, Log(), ["k1", "k2"]), path=path, headers=headers)[0]["status"] == status


@pytest.mark.parametrize(("ui", "method", "status"), [(True, "GET", 200), (True, "POST", 401), (False, "GET", 401)])
def test_the_page_alone_needs_no_key(ui: bool, method: str, status: int) -> None:
    gate = Gate(echo, Log(), ["k1"], ui=ui)
    assert ask(gate, path="/", method=method)[0]["status"] == status
    assert ask(gate, path="/ui/models", method=method)[0]["status"] == 401


@pytest.mark.parametrize(
    ("target", "path"),
    [
        *(("http://host:8000/health", "/health"), ("HTTPS://host/v1/models", "/v1/models"), ("http://host", "/")),
        *(("/http://host/x", "/http://host/x"), ("/x", "/x"), ("http://[::1]:8/a/http://b", "/a/http://b")),
    ],
)
def test_a_target_may_have_the_host_before_its_path(target: str, path: str) -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope["path"], scope["raw_path"]))
        await echo(scope, receive, send)

    log = Log()
    ask(Gate(app, log, ["k"]), path=target, headers={"authorization": "Bearer k"})
    assert seen == [(path, path.encode())]
    assert ask(Gate(app, log, ["k"]), path=target)[0]["status"] == (200 if path == "/health" else 401)


def failing(error: Exception, started: bool) -> Callable[..., Any]:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if started:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise error

    return app


def test_a_bug_is_a_clean_error_and_a_line_in_the_log() -> None:
    log = Log()
    sent = ask(Gate(failing(KeyError("secret"), started=False), log))
    assert (sent[0]["status"], b"secret" in sent[1]["body"]) == (500, False)
    assert "secret" in log.lines[-1]["error"]
    with pytest.raises(KeyError):  # the server closes the connection
        ask(Gate(failing(KeyError("secret"), started=True), log))


def test_a_client_that_takes_nothing_is_cut_off() -> None:
    async def stuck(message: Message) -> None:
        await asyncio.Event().wait()

    log = Log()
    with pytest.raises(TimeoutError if hasattr(asyncio, "timeout") else asyncio.TimeoutError):
        ask(Gate(echo, log, send_seconds=0.01), send=stuck)
    assert "took nothing" in log.lines[-1]["error"]


def test_probes_are_not_logged() -> None:
    log = Log()
    ask(Gate(echo, log), path="/health/ready")
    assert log.lines == []
