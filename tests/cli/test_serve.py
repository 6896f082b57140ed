"""`specbuild serve` from a shell: what is wrong with its options, and where they come from."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from command_line import Outcome
from serving import Server

from specbuild.serve import logs

COMMAND = str(Path(sys.executable).parent / "specbuild")


@pytest.fixture(autouse=True)
def _logs_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command in this process has none of its own."""
    monkeypatch.setattr(logs, "install", lambda log: None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["BUNDLE"]),
        (["nowhere.bundle"], ["nowhere.bundle"]),
        (["empty.bundle"], ["empty.bundle"]),
        (["bad.bundle"], ["bad.bundle", "manifest.json"]),
        (["{}", "--port", "70000"], ["port"]),
        (["{}", "--host", "203.0.113.1"], ["cannot listen", "203.0.113.1"]),
        (["{}", "{}"], ["one name"]),
        (["a={}", "b={}", "--served-model-name", "c"], ["--served-model-name", "NAME=BUNDLE"]),
        (["a={}", "a={}"], ["one name"]),
        (["{}", "--allowed-origins", "https://a"], ["--allowed-origins", "JSON"]),
        (["{}", "--allowed-origins", "[1]"], ["--allowed-origins", "JSON"]),
        (["{}", "--allowed-origins", '{"a": 1}'], ["--allowed-origins", "JSON"]),
        (["{}", "--chat-template", "none.jinja"], ["none.jinja"]),
        (["{}", "--chat-template", "broken.jinja"], ["chat template", "parse"]),
        (["{}", "--max-model-len", "999999"], ["max_model_len 999999", "--max-seq-len"]),
        (["{}", "--max-num-batched-tokens", "3", "--max-num-seqs", "4"], ["max_num_batched_tokens", "at least 2"]),
        (["{}", "--max-num-seqs", "999"], ["batch size 999"]),
        (["{}", "--api-key", " "], ["API key"]),
        (["{}", "--ssl-certfile", "c.pem"], ["--ssl-keyfile"]),
        (["{}", "--max-draft-tokens", "-1"], ["max_draft_tokens"]),
        (["{}", "--no-such-option"], ["--no-such-option"]),
        (["{}", "--max-model-len", "1"], ["max_model_len", "at least 2"]),
        (["{}", "--request-timeout", "-1"], ["request"]),
        (["{}", "--shutdown-timeout", "nan"], ["shutdown"]),
        (["{}", "--max-waiting", "0"], ["max_waiting"]),
        (["{}", "--reasoning-end", "</nothing>"], ["</nothing>", "no token of"]),
        (["{}", "--currency", "euro"], ["currency", "EUR"]),
        (["{}", "--owner", "a=b"], ["--ledger"]),
        (["{}", "--ledger", "none/l.jsonl"], ["none/l.jsonl", "--ledger"]),
        (["{}", "--config", "none.yaml"], ["none.yaml", "YAML"]),
        (["{}", "--config", "list.yaml"], ["list.yaml", "no table"]),
        (["{}", "--config", "empty.yaml"], ["empty.yaml", "no table"]),
        (["{}", "--config", "numbers.yaml"], ["numbers.yaml", "no table"]),
        (["{}", "--config", "python.yaml"], ["python.yaml", "YAML"]),
        (["{}", "--config", "binary.yaml"], ["binary.yaml", "YAML"]),
        (["{}", "--config", "."], ["YAML"]),
        (["{}", "--config", "nested.yaml"], ["nested.yaml", "'config'"]),
        (["{}", "--config", "origins.yaml"], ["--allowed-origins", "JSON"]),
        (["{}", "--config", "broken.yaml"], ["broken.yaml", "YAML"]),
        (["{}", "--config", "unknown.yaml"], ["unknown.yaml", "colour"]),
        (["{}", "--config", "wrong.yaml"], ["port"]),
        (["{}", "--config", "long.yaml"], ["long.yaml", "more than 1048576 bytes"]),
        (["{}", "--config", "slo.yaml"], ["slo", "is no time and no percentile"]),
        (["{}", "--slo", "p99"], ["slo 'p99'", "no time before it"]),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    words: list[str],
    bundle: Path,
    tmp_path: Path,
    specbuild: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "broken.jinja": "{% if %}",
        "long.yaml": "port: 8000\n" + "# " + "x" * (1 << 20),
        "list.yaml": "- 1\n",
        "empty.yaml": "",
        "numbers.yaml": "1: 2\n",
        "python.yaml": "port: !!python/object/apply:os.getpid []\n",
        "binary.yaml": "port: \0\n",
        "nested.yaml": "config: other.yaml\n",
        "slo.yaml": "slo: {ttft: 0.5}\n",
        "origins.yaml": "allowed-origins: [1]\n",
        "bad.bundle/manifest.json": "{",
        "empty.bundle/other": "",
        "broken.yaml": "port: [1\n",
        "unknown.yaml": "colour: red\n",
        "wrong.yaml": "port: many\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    told = specbuild("serve", *(each.replace("{}", str(bundle)) for each in arguments)).refusal()
    assert all(word in told for word in words), told


def test_options_come_from_a_file_and_the_command_line_goes_before_it(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_text(
        "port: 0\nmax-model-len: 64\nmax_num_seqs: 1\nserved-model-name: [one, two]\nreturn-token-ids: true\n"
    )
    flags = ["--config", str(tmp_path / "serve.yaml"), "--max-model-len", "32"]
    with Server(str(bundle), *flags, env={"SPECBUILD_API_KEY": "a, b"}) as server:
        with server.client() as client:
            assert client.get("/v1/models").status_code == 401
        with server.client(headers={"Authorization": "Bearer b"}) as client:
            cards = client.get("/v1/models").json()["data"]
            assert [(card["id"], card["max_model_len"]) for card in cards] == [("one", 32), ("two", 32)]
            asked: dict[str, Any] = {"prompt": "def main(", "max_tokens": 4}
            assert len(client.post("/v1/completions", json=asked).json()["choices"][0]["token_ids"]) == 4
            assert client.get("/load").json()["models"]["one"]["slots"] == 1


def test_a_port_that_is_taken(bundle: Path, specbuild: Callable[..., Outcome]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = specbuild("serve", bundle, "--port", port).refusal()
    assert f"127.0.0.1:{port}" in told


def test_a_key_of_the_command_line_goes_before_the_environments(bundle: Path, tmp_path: Path) -> None:
    """Lists of a file are options that are given several times, or JSON."""
    (tmp_path / "serve.yaml").write_text("api_key: [file]\nport: 0\nallowed-origins: ['https://a.example']\n")
    flags = ["--config", str(tmp_path / "serve.yaml")]
    for more, right in (([], "file"), (["--api-key", "flag"], "flag")):
        with Server(str(bundle), *flags, *more, env={"SPECBUILD_API_KEY": "environment"}) as server:
            for key in ("environment", "file", "flag"):
                told = {"Authorization": f"Bearer {key}", "Origin": "https://a.example"}
                response = httpx.get(f"{server.url}/v1/models", headers=told)
                assert response.status_code == (200 if key == right else 401)
                assert response.headers["access-control-allow-origin"] == "https://a.example"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_it_serves_ends_it_at_once(bundle: Path, number: int, tmp_path: Path) -> None:
    """While it reads a chat template that nobody writes to its end."""
    os.mkfifo(tmp_path / "template")
    command = [COMMAND, "serve", str(bundle), "--port", "0", "--chat-template", str(tmp_path / "template")]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as begun,
        (tmp_path / "template").open("w"),  # once the command has opened it
    ):
        begun.send_signal(number)
        out, told = begun.communicate(timeout=60)
    assert (begun.returncode, out) == (1, "")
    assert told.splitlines() == ["specbuild: interrupted: nothing half-done was left behind"]
