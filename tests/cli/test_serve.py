"""`specbuild serve` from a shell: what is wrong with its options, and where they come from."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from serving import Server

from specbuild.serve.telemetry import logs

COMMAND = str(Path(sys.executable).parent / "specbuild")


@pytest.fixture(autouse=True)
def _logs_are_left_alone(monkeypatch):
    """A command in this process has none of its own."""
    monkeypatch.setattr(logs, "install", lambda log: None)


def test_a_bad_file_of_options_is_refused(specbuild, bundle, tmp_path):
    file = tmp_path / "f.yaml"
    for text, words in {
        "- 1\n": "f.yaml is no table",
        "": "f.yaml is no table",
        "1: 2\n": "f.yaml is no table",
        "port: [1\n": "f.yaml cannot be read as YAML",
        "port: \0\n": "f.yaml cannot be read as YAML",
        "port: !!python/object/apply:os.getpid []\n": "f.yaml cannot be read as YAML",
        "#" + "x" * (1 << 20): "f.yaml has more than 1048576 bytes",
        "config: other.yaml\n": "f.yaml has 'config'",
        "colour: red\n": "f.yaml has 'colour'",
        "gpu-memory-utilization: 0.9\n": "there is no --gpu-memory-utilization here: use --kv-cache-tokens",
        "port: many\n": "port",
        "allowed-origins: [1]\n": "--allowed-origins is a list in JSON",
        "canary: {model: new}\n": "canary is speculation=auto",
    }.items():
        file.write_text(text)
        assert words in specbuild("serve", bundle, "--config", file).refusal()
    assert "cannot be read as YAML" in specbuild("serve", bundle, "--config", tmp_path).refusal()


@pytest.mark.slow
def test_options_come_from_a_file_and_the_command_line_goes_before_it(bundle, tmp_path):
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
            asked = {"prompt": "def main(", "max_tokens": 4}
            assert len(client.post("/v1/completions", json=asked).json()["choices"][0]["token_ids"]) == 4
            assert client.get("/load").json()["models"]["one"]["slots"] == 1


def test_a_port_that_is_taken(bundle, specbuild):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = specbuild("serve", bundle, "--port", port).refusal()
    assert f"127.0.0.1:{port}" in told


@pytest.mark.slow
def test_a_key_of_the_command_line_goes_before_the_environments(bundle, tmp_path):
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
def test_a_signal_before_it_serves_ends_it_at_once(bundle, number, tmp_path):
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
