"""`specbuild canary`: a table or JSON of what a server says, and one line where it says something else."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import pytest
from data_files import table

VIEW = table("canary.json")


class Answer(BaseHTTPRequestHandler):
    body: ClassVar[bytes] = b""

    def do_GET(self):
        keyed = self.headers.get("Authorization") == "Bearer right"
        status = 404 if self.path != "/canary" else 200 if keyed else 401
        self.send_response(status)
        self.end_headers()
        self.wfile.write(self.body if status == 200 else b"{}")

    def log_message(self, *_):
        pass


@pytest.fixture
def url(monkeypatch):
    monkeypatch.setattr(Answer, "body", json.dumps(VIEW).encode())
    server = HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_table_and_json(specbuild, url, monkeypatch):
    told = specbuild("canary", url, "--admin-key", "right")
    assert told.status == 0
    for words in (
        "speculation=chain:4 against speculation=off",
        "rolled back at 0 %",
        "80 requests of 200",
        "E 21.5; 20 is proof of harm",
        "7 texts of 8",
    ):
        assert words in told.out
    monkeypatch.setenv("SPECBUILD_ADMIN_KEY", "right")
    assert json.loads(specbuild("canary", f"{url}/", "--json").out) == VIEW


def test_what_a_server_does_not_have(specbuild, url, monkeypatch):
    assert "--admin-key" in specbuild("canary", url, "--admin-key", "wrong").refusal()
    assert "start it with --canary" in specbuild("canary", f"{url}/prefix", "--admin-key", "right").refusal()
    for body in (b"{}", b"[]", b"no JSON", b'{"alpha": 0}'):
        monkeypatch.setattr(Answer, "body", body)
        specbuild("canary", url, "--admin-key", "right").refusal(1)
    specbuild("canary", "http://127.0.0.1:1").refusal(1)


def test_canaries_of_ray_are_shown_by_replica(specbuild, url, monkeypatch):
    monkeypatch.setattr(Answer, "body", json.dumps({"replicas": {"one": VIEW, "two": VIEW}}).encode())
    lines = specbuild("canary", url, "--admin-key", "right").out.splitlines()
    assert [line for line in lines if line in ("one", "two")] == ["one", "two"]
    assert sum(line.startswith("pycode: ") for line in lines) == 2
