"""A server's life in a process of its own: signals, clients that leave or stall, a worker that dies."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from serving import Server

ASKED: dict[str, Any] = {"prompt": "def main(", "max_tokens": 16, "temperature": 0}
LONG = ASKED | {"max_tokens": 900, "ignore_eos": True, "speculation": "off"}
BREAKABLE = [sys.executable, str(Path(__file__).resolve().parents[1] / "support" / "breakable_server.py")]


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[Server]:
    with Server(str(bundle), "--port", "0", "--max-num-seqs", "2") as server:
        yield server


def until(holds: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.01)


def running(server: Server) -> int:
    with server.client() as client:
        return int(next(iter(client.get("/load").json()["models"].values()))["running"])


def begun(client: httpx.Client, body: dict[str, Any]) -> tuple[Any, Iterator[str]]:
    """A stream whose first event has come."""
    stream = client.stream("POST", "/v1/completions", json=body | {"stream": True})
    lines = stream.__enter__().iter_lines()
    next(lines)
    return stream, lines


def test_it_says_what_it_serves(server: Server) -> None:
    told = server.lines[0]["message"]
    for word in (
        "pycode",
        "fp32",
        "2 at once",
        "1024 tokens",
        "MB planned",
        "measured at",
        "temperature 1",
        "16 tokens",
    ):
        assert word in told
    with server.client() as client:
        assert client.post("/v1/completions", json=ASKED).status_code == 200
    assert not server.other


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slot(server: Server, stream: bool) -> None:
    with server.client() as client:
        if stream:
            opened, _lines = begun(client, LONG)
            assert running(server) == 1
            opened.__exit__(None, None, None)
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=LONG, timeout=0.3)
    until(lambda: running(server) == 0, 10)


@pytest.mark.slow
def test_a_reader_that_stalls_holds_nobody_up(server: Server) -> None:
    host, port = httpx.URL(server.url).host, httpx.URL(server.url).port
    body = json.dumps(LONG | {"stream": True, "return_token_ids": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        stalled.connect((host, port))
        stalled.sendall(head.encode() + b"\r\n\r\n" + body)
        until(lambda: running(server) == 1)
        with server.client() as client:
            assert client.post("/v1/completions", json=ASKED).json()["usage"]["completion_tokens"] == 16
        until(lambda: running(server) == 0)  # what it does not read is kept for it, and no slot


def test_sigterm_finishes_what_was_accepted(bundle: Path) -> None:
    with Server(str(bundle), "--port", "0", "--max-num-seqs", "1") as server, server.client() as client:
        stream, lines = begun(client, LONG | {"max_tokens": 700})
        results: list[httpx.Response] = []
        waiting = threading.Thread(
            target=lambda: results.append(httpx.post(f"{server.url}/v1/completions", json=ASKED, timeout=60))
        )
        waiting.start()
        until(lambda: server.client().get("/load").json()["server_load"] == 2)
        server.signal(signal.SIGTERM)
        with server.client() as other:
            until(lambda: other.get("/health/ready").status_code == 503)
            refused = other.post("/v1/completions", json=ASKED)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        told = [line for line in lines if line]
        assert told[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in told[-2]
        stream.__exit__(None, None, None)
        waiting.join()
        assert results[0].status_code == 200
        assert server.wait() == 0
        assert not server.other


def test_what_takes_longer_than_a_drain_gets_a_clean_error(bundle: Path) -> None:
    with Server(str(bundle), "--port", "0", "--shutdown-timeout", "0.1") as server, server.client() as client:
        stream, lines = begun(client, LONG)
        results: list[httpx.Response] = []
        waiting = threading.Thread(
            target=lambda: results.append(httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=60))
        )
        waiting.start()
        until(lambda: running(server) == 2)
        server.signal(signal.SIGTERM)
        told = [line for line in lines if line]
        assert (told[-1], '"error"' in told[-2]) == ("data: [DONE]", True)
        stream.__exit__(None, None, None)
        waiting.join()
        assert (results[0].status_code, results[0].json()["error"]["code"]) == (503, "draining")
        assert server.wait() == 0


def test_a_second_signal_stops_at_once(bundle: Path) -> None:
    with Server(str(bundle), "--port", "0") as server, server.client() as client:
        _stream, _lines = begun(client, LONG)
        server.signal(signal.SIGINT)
        until(lambda: any("draining" in line["message"] for line in server.lines))
        server.signal(signal.SIGINT)
        assert server.wait(10) == 1
        assert not server.other


def test_a_dead_worker_ends_the_server(bundle: Path, tmp_path: Path) -> None:
    env = {"BREAK": str(tmp_path / "now")}
    with Server(str(bundle), "--port", "0", program=BREAKABLE, env=env) as server, server.client() as client:
        stream, lines = begun(client, LONG)
        (tmp_path / "now").touch()
        told = [line for line in lines if line]
        assert '"error"' in told[-2]
        stream.__exit__(None, None, None)
        assert server.wait() == 1
        assert any(line["level"] == "error" and "planted" in line["message"] for line in server.lines)


def test_a_unix_socket(bundle: Path, tmp_path: Path) -> None:
    with Server(str(bundle), "--uds", str(tmp_path / "s")) as server, server.client() as client:
        assert client.post("/v1/completions", json=ASKED).status_code == 200
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    assert not (tmp_path / "s").exists()


def test_tls(bundle: Path, tmp_path: Path) -> None:
    authority, files = trustme.CA(), (tmp_path / "cert.pem", tmp_path / "key.pem")
    ours = authority.issue_cert("127.0.0.1")
    ours.cert_chain_pems[0].write_to_path(str(files[0]))
    ours.private_key_pem.write_to_path(str(files[1]))
    verify = ssl.create_default_context()
    authority.configure_trust(verify)
    flags = ("--ssl-certfile", str(files[0]), "--ssl-keyfile", str(files[1]))
    with Server(str(bundle), "--port", "0", *flags) as server, server.client(verify=verify) as client:
        assert server.url.startswith("https://")
        with client.stream("POST", "/v1/completions", json=ASKED | {"stream": True}) as stream:
            assert [line for line in stream.iter_lines() if line][-1] == "data: [DONE]"
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.url.replace("https", "http") + "/health")
        assert client.get("/health").status_code == 200


def test_two_bundles_in_one_process(bundle: Path) -> None:
    with Server(f"a={bundle}", f"b={bundle}", "--port", "0") as server, server.client() as client:
        assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["a", "b"]
        texts = [client.post("/v1/completions", json=ASKED | {"model": name}).json() for name in ("a", "b")]
        assert [each["model"] for each in texts] == ["a", "b"]
        assert texts[0]["choices"][0]["text"] == texts[1]["choices"][0]["text"]
        assert client.post("/v1/completions", json=ASKED).status_code == 400
        for name in ("a", "b"):
            assert f'specbuild:num_requests_running{{model_name="{name}"}}' in client.get("/metrics").text


def test_requests_of_probes_and_proxies_one_after_another(server: Server) -> None:
    """By one connection, as bytes: what one is answered does not get into the next one's answer."""
    asked = [
        *(("HEAD", "/health", 200), ("GET", "http://host/health", 200), ("HEAD", "http://host:1/v1/models", 200)),
        *(("OPTIONS", "/v1/models", 204), ("DELETE", "/v1/models", 405), ("GET", "http://host/nowhere?x=1", 404)),
        *(("HEAD", "/v1/completions", 405), ("GET", "/health", 200)),
    ]
    with socket.create_connection((httpx.URL(server.url).host, httpx.URL(server.url).port), 10) as raw:
        for method, target, status in asked:
            raw.sendall(f"{method} {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            reply = http.client.HTTPResponse(raw, method=method)
            reply.begin()
            body = reply.read()
            assert reply.status == status, (method, target)
            assert bool(body) == (method not in ("HEAD", "OPTIONS"))
            assert ("allow" in reply.headers) == (status in (204, 405))


@pytest.mark.parametrize("status", [413, 431])
def test_too_much_of_anything(server: Server, status: int) -> None:
    host, port = httpx.URL(server.url).host, httpx.URL(server.url).port
    big = b"x" * 70_000 if status == 431 else b"x"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX: " + big + b"\r\nContent-Length: 999999999\r\n\r\n"
    with socket.create_connection((host, port), 10) as raw:
        raw.sendall(head)
        line = raw.makefile("rb").readline()
    assert line.split()[1] == str(status).encode()
    until(lambda: running(server) == 0)
