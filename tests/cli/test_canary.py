"""`specbuild canary`: a table or JSON of what a server says, and one line where it says something else."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest

from .conftest import Outcome

Specbuild = Callable[..., Outcome]
ROW = {"metric": "ttft", "harm": 40.5, "fine": 0.01, "n": [120, 80], "means": [0.1, 0.12345]}
VIEW: dict[str, Any] = {
    **{
        "model": "pycode",
        "candidate": "speculation=chain:4",
        "baseline": "asked",
        "phase": "rolled back",
        "weight": 0.0,
    },
    **{
        "max_weight": 50.0,
        "action": "rollback",
        "alpha": 0.05,
        "margin": 0.1,
        "requests": {"baseline": 120, "candidate": 80},
    },
    "verdict": {"kind": "rollback", "e": 21.5, "evidence": ROW},
    "evidence": [ROW, ROW | {"metric": "quality", "fine": None, "means": [None, -1.5]}],
    "divergence": {"texts": 7, "kl": 0.0123},
}


class Answer(BaseHTTPRequestHandler):
    body: ClassVar[bytes] = b""

    def do_GET(self) -> None:
        keyed = self.headers.get("Authorization") == "Bearer right"
        status = 404 if self.path != "/canary" else 200 if keyed else 401
        self.send_response(status)
        self.end_headers()
        self.wfile.write(self.body if status == 200 else b"{}")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Answer, "body", json.dumps(VIEW).encode())
    server = HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_table_and_json(specbuild: Specbuild, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = specbuild("canary", url, "--api-key", "right")
    assert told.status == 0
    for words in (
        "speculation=chain:4 against asked",
        "rolled back at 0 %",
        "80 requests of 200",
        "0.1235",
        "120 + 80",
    ):
        assert words in told.out
    assert "rollback: E 21.5 of 20, by ttft" in told.out
    assert "KL 0.0123 nats a token over 7 texts" in told.out
    monkeypatch.setenv("SPECBUILD_API_KEY", "right,other")
    assert json.loads(specbuild("canary", f"{url}/", "--json").out) == VIEW


@pytest.mark.parametrize(
    ("suffix", "key", "status", "words"),
    [("", "wrong", 2, "--api-key"), ("/prefix", "right", 2, "start it with --canary")],
)
def test_refusals(specbuild: Specbuild, url: str, suffix: str, key: str, status: int, words: str) -> None:
    told = specbuild("canary", url + suffix, "--api-key", key)
    assert (told.status, words in told.err, told.err.count("\n")) == (status, True, 1)


@pytest.mark.parametrize("body", [b"{}", b"[]", b"no JSON", b'{"alpha": 0}'])
def test_answers_that_are_no_canary(
    specbuild: Specbuild, url: str, monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    monkeypatch.setattr(Answer, "body", body)
    told = specbuild("canary", url, "--api-key", "right")
    assert (told.status, told.err.count("\n"), told.out) == (1, 1, "")


def test_no_server_and_no_url(specbuild: Specbuild) -> None:
    assert specbuild("canary", "http://127.0.0.1:1").status == 1
    told = specbuild("canary", "localhost")
    assert (told.status, "no URL" in told.err) == (2, True)
