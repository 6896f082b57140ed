"""`specbuild serve` from a shell: what is wrong with its options, and where they come from."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from serving import Server

COMMAND = str(Path(sys.executable).parent / "specbuild")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["BUNDLE"]),
        (["nowhere.bundle"], ["nowhere.bundle"]),
        (["{}", "--port", "70000"], ["port"]),
        (["{}", "--host", "203.0.113.1"], ["cannot listen", "203.0.113.1"]),
        (["{}", "{}"], ["one name"]),
        (["a={}", "b={}", "--served-model-name", "c"], ["--served-model-name", "NAME=BUNDLE"]),
        (["{}", "--allowed-origins", "https://a"], ["--allowed-origins", "JSON"]),
        (["{}", "--chat-template", "none.jinja"], ["none.jinja"]),
        (["{}", "--chat-template", "broken.jinja"], ["chat template", "parse"]),
        (["{}", "--max-model-len", "999999"], ["max_model_len 999999", "--max-seq-len"]),
        (["{}", "--max-num-batched-tokens", "3", "--max-num-seqs", "4"], ["max_num_batched_tokens", "at least 2"]),
        (["{}", "--max-num-seqs", "999"], ["batch size 999"]),
        (["{}", "--api-key", " "], ["API key"]),
        (["{}", "--ssl-certfile", "c.pem"], ["--ssl-keyfile"]),
        (["{}", "--max-draft-tokens", "-1"], ["max_draft_tokens"]),
        (["{}", "--config", "none.yaml"], ["none.yaml", "YAML"]),
        (["{}", "--config", "list.yaml"], ["list.yaml", "no table"]),
        (["{}", "--config", "broken.yaml"], ["broken.yaml", "YAML"]),
        (["{}", "--config", "unknown.yaml"], ["unknown.yaml", "colour"]),
        (["{}", "--config", "wrong.yaml"], ["port"]),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], words: list[str], bundle: Path, tmp_path: Path) -> None:
    for name, text in {
        "broken.jinja": "{% if %}",
        "list.yaml": "- 1\n",
        "broken.yaml": "port: [1\n",
        "unknown.yaml": "colour: red\n",
        "wrong.yaml": "port: many\n",
    }.items():
        (tmp_path / name).write_text(text)
    command = [COMMAND, "serve", *(each.replace("{}", str(bundle)) for each in arguments)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    lines = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert len(lines) == 1, done.stderr
    assert all(word in lines[0] for word in words), lines


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_it_serves_ends_it_at_once(bundle: Path, number: int) -> None:
    with subprocess.Popen([COMMAND, "serve", str(bundle), "--port", "0"], stderr=subprocess.PIPE, text=True) as begun:
        assert begun.stderr
        begun.send_signal(number)
        told = begun.stderr.read()
        assert begun.wait(30) != 0
    assert len(told.splitlines()) <= 1, told
    assert "Traceback" not in told
