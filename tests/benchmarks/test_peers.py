"""benchmarks/peers without the peers: what passes between its processes, its arithmetic, and specbuild's own worker."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specbuild.runtime import Engine, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / "benchmarks" / "peers"
TOY = """
import os
from protocol import Decoded, serve

class Toy:
    versions, settings, modes = {"toy": "1"}, {}, ("plain", "auto", "short", "broken", "fatal")

    def __init__(self, job):
        print("no answer")
        if job["threads"] == 13:
            raise ValueError("thirteen\\nthreads")

    def decode(self, mode, tokens, n):
        if mode == "broken":
            raise RuntimeError("cannot\\n  do that")
        if mode == "fatal":
            os._exit(3)
        os.write(1, b"neither is this\\n")
        return Decoded([tokens[-1] + 1 + i for i in range(n - (mode == "short"))], 0.5, 1.5)

serve(Toy)
"""


@pytest.fixture(scope="module")
def load() -> Iterator[Callable[[str], Any]]:
    """A module of benchmarks/peers; what it imports from there and from benchmarks/ is forgotten afterwards."""
    before, path = set(sys.modules), list(sys.path)
    sys.path.insert(0, str(PEERS))
    yield importlib.import_module
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if str(PEERS.parent) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def toy(load: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`toy(threads)`: a started worker of TOY."""
    worker = load("worker")
    monkeypatch.setattr(worker, "HERE", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(PEERS))
    (tmp_path / "with_toy_peer.py").write_text(TOY)
    return lambda threads=2: worker.Worker("toy-peer", Path(sys.executable), job(tmp_path, threads=threads))


def job(folder: Path, **fields: Any) -> dict[str, Any]:
    return {"target": "", "draft": "", "bundle": "", "threads": 2, "float32": True, "folder": str(folder)} | fields


def test_a_worker_answers_each_request_and_survives_those_it_cannot_do(toy: Callable[..., Any], load: Any) -> None:
    error = load("worker").PeerError
    with toy() as peer:
        assert (peer.about["versions"], peer.modes) == ({"toy": "1"}, ["plain", "auto", "short", "broken", "fatal"])
        assert tuple(peer.decode("plain", [1, 5], 3)) == ([6, 7, 8], 0.5, 1.5)
        with pytest.raises(error, match=r"^toy-peer, broken: cannot do that$"):
            peer.decode("broken", [1], 3)
        with pytest.raises(error, match=r"^toy-peer, short: 2 tokens where 3 were asked for$"):
            peer.decode("short", [1], 3)
        assert peer.decode("plain", [7], 2).tokens == [8, 9]
    assert peer._process.returncode == 0
    assert "no answer" in peer.log.read_text()


def test_a_worker_that_ends_or_cannot_load_is_said_in_a_line(toy: Callable[..., Any], load: Any) -> None:
    error = load("worker").PeerError
    with pytest.raises(error, match=r"^toy-peer: thirteen threads$"):
        toy(threads=13)
    with pytest.raises(error, match=r"worker ended with status 3: see .*worker\.log$"), toy() as peer:
        peer.decode("fatal", [1], 3)


def test_modes_that_cannot_be_had_are_told_and_not_measured(toy: Callable[..., Any], load: Any) -> None:
    run = load("run")
    with toy() as peer, toy() as ours:
        peer.about["modes"], ours.about["modes"] = ["broken", "plain", "short"], ["plain", "auto"]
        result = run.measure({"specbuild": ours, "toy-peer": peer}, [[1], [2]], 4)
        assert {name: list(modes) for name, modes in result["peers"].items()} == {
            "specbuild": ["plain", "auto"],
            "toy-peer": ["plain"],
        }
        assert result["peers"]["toy-peer"]["plain"]["requests"] == 2
        assert result["refused"] == {
            "toy-peer, broken": "toy-peer, broken: cannot do that",
            "toy-peer, short": "toy-peer, short: 3 tokens where 4 were asked for",
        }
        ours.about["modes"] = ["plain", "short"]
        with pytest.raises(load("worker").PeerError, match=r"^there is nothing to compare with: toy-peer, short: 3 "):
            run.measure({"specbuild": ours}, [[1]], 4)


def test_ratios_are_of_whole_requests_and_of_what_follows_the_first_token(load: Callable[[str], Any]) -> None:
    table, decoded = load("table"), load("protocol").Decoded

    def tally(first: float, total: float, equal: bool = True) -> Any:
        one = table.Tally()
        one.add(decoded([0] * 11, first, total), equal)
        one.add(decoded([0] * 11, first, total), True)
        return one

    result = table.ratios(
        {
            "specbuild": {"plain": tally(1, 11), "auto": tally(1, 3)},
            "slow": {"plain": tally(2, 22, equal=False), "draft": tally(6, 11)},
            "fast": {
                "plain": tally(2, 12),
                "plain, other": tally(1, 6),
                "lookup": tally(3.5, 5.5),
                "slower": tally(1, 5),
            },
        }
    )
    draft = result["peers"]["slow"]["draft"]
    assert (draft["request_tokens_per_s"], draft["decode_tokens_per_s"], draft["ttft_ms"]) == (1.0, 2.0, 6000.0)
    assert (draft["request_over_own_plain"], draft["decode_over_own_plain"]) == (2.0, 4.0)
    assert (draft["request_auto_over_this"], draft["decode_auto_over_this"]) == (3.67, 2.5)
    assert result["peers"]["fast"]["slower"]["request_over_own_plain"] == 1.2  # of its fastest plain mode
    assert result["peers"]["slow"]["plain"]["equal_to_specbuild_plain"] == 1
    best = {"request": ("fast", "slower", 1.67), "decode": ("fast", "lookup", 1.0)}
    assert {which: tuple(one.values()) for which, one in result["auto_over_fastest_peer"].items()} == best
    lines = table.markdown(result).splitlines()
    assert lines[5] == "| slow, draft | 1 | 2.00× | 3.67× | 2 | 4.00× | 2.50× | 2 of 2 |"
    assert len(lines) == 2 + 8


def test_specbuilds_worker_decodes_as_the_engine_does_and_past_the_end(load: Any, bundle: Path, tmp_path: Path) -> None:
    worker = load("worker")
    with Engine.load(bundle) as engine:
        tokens = engine.tokenizer.encode("if __name__ == '__main__':\n    unittest.main()\n")
        params = SamplingParams(max_new_tokens=24, ignore_eos=True, speculation="off")
        expected = list(engine.generate([tokens], params)[0].token_ids)
    assert expected[0] == 0  # what ends a text
    with worker.Worker("specbuild", Path(sys.executable), job(tmp_path, bundle=str(bundle))) as peer:
        for mode in peer.modes:
            decoded = peer.decode(mode, tokens, 24)
            assert decoded.tokens == expected
            assert 0 < decoded.first < decoded.total


def run(load: Callable[[str], Any], bundle: Path, tmp_path: Path, pair: Path, *more: str) -> int:
    paths = ("--target", pair / "target", "--draft", pair / "draft", "--bundle", bundle, "--folder", tmp_path)
    status: int = load("run").main([*map(str, paths), "--only", "specbuild", "--num-prompts", "2", *more])
    return status


def test_a_run_measures_every_mode_on_every_prompt(
    load: Any, bundle: Path, tmp_path: Path, pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "result.json"
    assert run(load, bundle, tmp_path, pair, "--max-new-tokens", "4", "--output", str(output)) == 0
    result = json.loads(output.read_text())
    assert {mode: row["requests"] for mode, row in result["peers"]["specbuild"].items()} == {
        "plain": 2,
        "auto": 2,
        "best:5": 2,
    }
    assert all(row["equal_to_specbuild_plain"] == 2 for row in result["peers"]["specbuild"].values())
    assert (result["refused"], result["auto_over_fastest_peer"]) == ({}, {})
    assert "| specbuild, auto |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--only", "specbuild,vllm"], "--only vllm: use specbuild, transformers, openvino, onnxruntime-genai"),
        (["--num-prompts", "33"], "--num-prompts 33 is more than the 32 prompts of "),
        (["--max-new-tokens", "1"], "--max-new-tokens at least 2"),
        (["--bundle", "nowhere"], "nowhere/manifest.json is missing"),
        (["--prompts", str(ROOT / "Makefile")], "Makefile cannot be read"),
    ],
)
def test_what_cannot_be_run_is_said_in_a_line(
    load: Any, bundle: Path, tmp_path: Path, pair: Path, capsys: Any, more: list[str], said: str
) -> None:
    assert run(load, bundle, tmp_path, pair, *more) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("peers: ")
    assert said in line


def test_a_checkpoint_is_converted_once_and_again_where_it_changed(load: Any, tmp_path: Path) -> None:
    convert = load("conversion").converted
    source, folder = tmp_path / "source", tmp_path / "models"
    for each in (source, folder):
        each.mkdir()
    (source / "config.json").write_text("{}")
    code = "import pathlib, sys; out = pathlib.Path(sys.argv[1]); out.mkdir(); (out / 'made').write_text('x')"

    def command(out: Path) -> list[str]:
        return [sys.executable, "-c", code, str(out)]

    first = convert(source, folder, command)
    (first / "made").write_text("kept")
    assert (convert(source, folder, command) / "made").read_text() == "kept"
    (source / "config.json").write_text("{ }")
    assert (convert(source, folder, command) / "made").read_text() == "x"
    with pytest.raises(RuntimeError, match=r"source could not be converted: .* ended with status 2$"):
        convert(source, folder, lambda out: [sys.executable, "-c", "import sys; sys.exit(2)", str(out)])
    assert len(list(folder.iterdir())) == 2


def test_an_environment_is_made_once_and_again_where_its_requirements_changed(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments, ran, status = load("environments"), list[list[str]](), [0]

    def pretend(command: list[str], **_: Any) -> Any:
        ran.append(command)
        (tmp_path / "transformers" / "venv").mkdir(parents=True, exist_ok=True)
        return SimpleNamespace(returncode=status[0])

    monkeypatch.setattr(environments.subprocess, "run", pretend)
    folder = tmp_path / "transformers"
    assert environments.python("specbuild", tmp_path) == Path(sys.executable)
    assert environments.python("transformers", folder) == folder / "venv" / "bin" / "python"
    assert [command[1:3] for command in ran] == [["-m", "venv"], ["-m", "pip"]]
    environments.python("transformers", folder)
    assert len(ran) == 2
    (folder / "venv" / "requirements.txt").write_text("torch==1")
    status[0] = 7
    with pytest.raises(load("worker").PeerError, match=r"could not be made \(status 7"):
        environments.python("transformers", folder)
    assert not (folder / "venv").exists()


@pytest.mark.parametrize("name", ["transformers", "openvino", "onnxruntime-genai"])
def test_every_requirement_is_pinned(name: str) -> None:
    lines = [line for line in (PEERS / f"{name}.txt").read_text().splitlines() if not line.startswith("#")]
    assert lines
    assert all(line.count("==") == 1 for line in lines)
    assert name.replace("openvino", "openvino-genai") in {line.split("==")[0] for line in lines}
