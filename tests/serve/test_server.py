"""A server's life in a process of its own: signals, clients that leave or stall, a worker that dies."""

import http.client
import json
import resource
import signal
import socket
import ssl
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import trustme
from route_client import ASKED, COMPLETIONS
from serving import Server, until

SHORT = ASKED[COMPLETIONS]
LONG = SHORT | {"max_tokens": 900, "ignore_eos": True, "speculation": "off"}
BREAKABLE = [sys.executable, str(Path(__file__).resolve().parents[1] / "support" / "breakable_server.py")]


@pytest.fixture
def start(bundle):
    """`start(*flags)`: a server at any free port."""
    return lambda *flags, **more: Server(str(bundle), "--port", "0", *flags, **more)


def load(server):
    """Samples that run, and requests."""
    with server.client() as client:
        told = client.get("/load").json()
    return sum(model["running"] for model in told["models"].values()), told["server_load"]


@contextmanager
def begun(client, body):
    """The lines of a stream whose first event has come."""
    with client.stream("POST", COMPLETIONS, json=body | {"stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        yield (line for line in lines if line)


@contextmanager
def connected(server):
    """A connection that knows nothing of HTTP, and reads little at a time."""
    url = httpx.URL(server.url)
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        raw.settimeout(30)
        raw.connect((url.host, url.port))
        yield raw


@pytest.mark.slow
def test_a_client_that_leaves_frees_its_slot(server):
    with server.client() as client:
        with begun(client, LONG):
            assert load(server)[0] == 1
        until(lambda: load(server)[0] == 0, 10)
        with pytest.raises(httpx.ReadTimeout):
            client.post(COMPLETIONS, json=LONG, timeout=0.3)
    until(lambda: load(server)[0] == 0, 10)


@pytest.mark.nightly
def test_a_reader_that_stalls_holds_nobody_up(server):
    body = json.dumps(LONG | {"stream": True, "return_token_ids": True}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with connected(server) as stalled:
        stalled.sendall(head.encode() + b"\r\n\r\n" + body)
        until(lambda: load(server)[0] == 1)
        with server.client() as client:
            assert client.post(COMPLETIONS, json=SHORT).json()["usage"]["completion_tokens"] == 12
        until(lambda: load(server)[0] == 0)  # what it does not read is kept for it, and no slot


@pytest.mark.slow
def test_idle_sockets_keep_no_probe_and_no_request_out(server):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4096), hard), hard))
    url = httpx.URL(server.url)
    sockets = [socket.create_connection((url.host, url.port)) for _ in range(1100)]
    with server.client() as client:
        assert client.get("/health/live").status_code == 200
        assert client.post(COMPLETIONS, json=SHORT).status_code == 200
    for each in sockets:
        each.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
def test_sigterm_finishes_what_was_accepted(start):
    with (
        start("--max-num-seqs", "1") as server,
        server.client() as client,
        ThreadPoolExecutor(1) as pool,
        begun(client, LONG | {"max_tokens": 700}) as lines,
    ):
        waiting = pool.submit(client.post, COMPLETIONS, json=SHORT)
        until(lambda: load(server)[1] == 2)
        server.signal(signal.SIGHUP)
        with server.client() as other:
            assert other.get("/health/ready").status_code == 200, "it ends nothing"
        server.signal(signal.SIGTERM)
        with server.client() as other:
            until(lambda: other.get("/health/ready").status_code == 503)
            refused = other.post(COMPLETIONS, json=SHORT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        *_, last, done = lines
        assert ('"finish_reason":"length"' in last, done) == (True, "data: [DONE]")
        assert waiting.result().status_code == 200
        assert (server.wait(), server.other) == (0, [])


@pytest.mark.slow
def test_what_takes_longer_than_a_drain_gets_a_clean_error(bundle, tmp_path):
    """By a Unix socket, which is gone with its server."""
    flags = ("--uds", str(tmp_path / "s"), "--shutdown-timeout", "0.1")
    with (
        Server(str(bundle), *flags) as server,
        server.client() as client,
        ThreadPoolExecutor(1) as pool,
        begun(client, LONG) as lines,
    ):
        waiting = pool.submit(client.post, COMPLETIONS, json=LONG)
        until(lambda: load(server)[0] == 2)
        server.signal(signal.SIGTERM)
        *_, last, done = lines
        assert ('"error"' in last, done) == (True, "data: [DONE]")
        reply = waiting.result()
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "draining")
        assert server.wait() == 0
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
def test_a_second_signal_stops_at_once(start):
    with start() as server, server.client() as client:
        stream = begun(client, LONG)
        stream.__enter__()
        server.signal(signal.SIGINT)
        until(lambda: any("draining" in line["message"] for line in server.lines))
        server.signal(signal.SIGINT)
        assert (server.wait(10), server.other) == (1, [])


@pytest.mark.slow
def test_a_dead_worker_ends_the_server(start, tmp_path):
    env = {"BREAK": str(tmp_path / "now")}
    with start(program=BREAKABLE, env=env) as server, server.client() as client, begun(client, LONG) as lines:
        (tmp_path / "now").touch()
        assert '"error"' in [*lines][-2]
        assert server.wait() == 1
        assert any(line["level"] == "error" and "planted" in line["message"] for line in server.lines)


@pytest.mark.slow
def test_two_bundles_behind_tls(bundle, tmp_path):
    authority, certificate, key = trustme.CA(), tmp_path / "cert.pem", tmp_path / "key.pem"
    ours = authority.issue_cert("127.0.0.1")
    ours.cert_chain_pems[0].write_to_path(str(certificate))
    ours.private_key_pem.write_to_path(str(key))
    verify = ssl.create_default_context()
    authority.configure_trust(verify)
    flags = ("--port", "0", "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
    with Server(f"a={bundle}", f"b={bundle}", *flags) as server, server.client(verify=verify) as client:
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.url.replace("https", "http") + "/health")
        assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["a", "b"]
        texts = [client.post(COMPLETIONS, json=SHORT | {"model": name}).json() for name in "ab"]
        assert [each["model"] for each in texts] == ["a", "b"]
        assert texts[0]["choices"][0]["text"] == texts[1]["choices"][0]["text"]
        assert client.post(COMPLETIONS, json=SHORT).status_code == 400
        with begun(client, SHORT | {"model": "a"}) as lines:
            assert [*lines][-1] == "data: [DONE]"


ASKED_RAW = """
HEAD /health 200
GET http://host/health 200
HEAD http://host:1/v1/models 200
OPTIONS /v1/models 204
DELETE /v1/models 405
GET http://host/nowhere?x=1 404
HEAD /v1/completions 405
GET /health 200
"""


def test_requests_of_probes_and_proxies_one_after_another(server):
    """By one connection, as bytes: what one is answered does not get into the next one's answer."""
    with connected(server) as raw:
        for line in ASKED_RAW.strip().splitlines():
            method, target, status = line.split()
            raw.sendall(f"{method} {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            reply = http.client.HTTPResponse(raw, method=method)
            reply.begin()
            body = reply.read()
            assert str(reply.status) == status, (method, target)
            assert bool(body) == (method not in ("HEAD", "OPTIONS"))
            assert ("allow" in reply.headers) == (status in ("204", "405"))
