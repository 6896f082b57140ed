"""benchmarks/peers without the peers: what passes between its processes, its arithmetic, and specbuild's own worker."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.peers import conversion, run, table, worker

pytestmark = pytest.mark.nightly
TOY = """
import os
from protocol import Decoded, serve

class Toy:
    versions, settings, modes = {"toy": "1"}, {}, ("plain", "auto", "short", "broken")

    def __init__(self, job):
        print("no answer")
        if job["threads"] == 13:
            raise ValueError("thirteen\\nthreads")

    def decode(self, mode, tokens, n):
        if mode == "broken":
            raise RuntimeError("cannot\\n  do that")
        os.write(1, b"neither is this\\n")
        return Decoded([tokens[-1] + 1 + i for i in range(n - (mode == "short"))], 0.5, 1.5)

serve(Toy)
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """The job of a worker of TOY."""
    monkeypatch.setenv("PYTHONPATH", str(worker.HERE))
    monkeypatch.setattr(worker, "HERE", tmp_path)
    (tmp_path / "with_toy.py").write_text(TOY)
    return {"threads": 2, "folder": str(tmp_path)}


def test_a_worker_answers_each_request_and_says_in_a_line_what_it_cannot_do(job):
    with worker.Worker("toy", Path(sys.executable), job) as peer:
        for mode, said in (("broken", "cannot do that"), ("short", "2 tokens where 3 were asked for")):
            with pytest.raises(worker.PeerError, match=rf"^toy, {mode}: {said}$"):
                peer.decode(mode, [1], 3)
        assert tuple(peer.decode("plain", [1, 5], 3)) == ([6, 7, 8], 0.5, 1.5)
        result = run.measure({"specbuild": peer}, [[1], [2]], 4)
    assert {mode: row["requests"] for mode, row in result["peers"]["specbuild"].items()} == {"plain": 2, "auto": 2}
    assert set(result["refused"]) == {"specbuild, broken", "specbuild, short"}
    with pytest.raises(worker.PeerError, match=r"^toy: thirteen threads$"):
        worker.Worker("toy", Path(sys.executable), job | {"threads": 13})


def test_ratios_are_of_whole_requests_and_of_what_follows_the_first_token():
    def tally(first, total):
        return table.Tally(requests=1, tokens=11, first=first, total=total, equal=1)

    peer = {"plain": tally(2, 22), "plain, other": tally(1, 11), "draft": tally(1, 6)}
    result = table.ratios({"specbuild": {"plain": tally(1, 11), "auto": tally(1, 3)}, "slow": peer})
    draft = result["peers"]["slow"]["draft"]
    assert (draft["request_over_own_plain"], draft["decode_over_own_plain"]) == (1.83, 2.0)  # the fastest plain mode
    assert (draft["request_auto_over_this"], draft["decode_auto_over_this"]) == (2.0, 2.5)
    assert tuple(result["auto_over_fastest_peer"]["decode"].values()) == ("slow", "draft", 2.5)


def test_specbuild_decodes_every_prompt_in_every_mode(bundle, tmp_path, pair, capsys):
    paths = ("--target", pair / "target", "--draft", pair / "draft", "--bundle", bundle, "--folder", tmp_path)
    given = [*map(str, paths), "--only", "specbuild", "--num-prompts", "2", "--out", str(tmp_path / "out.json")]
    assert run.main([*given, "--max-new-tokens", "4"]) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert list(result["peers"]["specbuild"]) == ["plain", "auto", "best:5"]
    assert all(row["equal_to_specbuild_plain"] == 2 for row in result["peers"]["specbuild"].values())
    capsys.readouterr()
    for wrong in (["--only", "vllm"], ["--num-prompts", "99"], ["--bundle", "nowhere"], ["--prompts", "nothing"]):
        assert run.main([*given, *wrong]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("peers: ")
        assert wrong[1] in line


def test_a_checkpoint_is_converted_once_and_again_where_it_changed(tmp_path):
    source, folder = tmp_path / "source", tmp_path / "models"
    source.mkdir()
    folder.mkdir()
    for content in ("{}", "{}", "{ }"):
        (source / "config.json").write_text(content)
        conversion.converted(source, folder, lambda out: ["mkdir", str(out)])
    assert len(list(folder.iterdir())) == 2
    with pytest.raises(RuntimeError, match=r"could not be converted: false ended with status 1$"):
        conversion.converted(source, folder, lambda out: ["false", str(out)])
