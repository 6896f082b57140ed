"""`specbuild tune`: what it prints and refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from specbuild.cli import tune as command


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "b"))


@pytest.mark.slow
def test_a_table_and_what_follows_from_it(specbuild: Any, copy: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "import os\\n"}\n{"prompt": "x = ", "temperature": 1.0}\n')
    outcome = specbuild("tune", copy, "--prompts", prompts, "--num-prompts", 1, "-n", 12)
    assert (outcome.status, outcome.err) == (0, "")
    assert [line.split()[0] for line in outcome.out.splitlines()[1:7]] == [f"best:{n}" for n in (1, 2, 4, 8, 16, 32)]
    for shown in ("measured", "auto ", "of the draft model", "calibration error"):
        assert shown in outcome.out
    report = json.loads(specbuild("tune", copy, "-n", 8, "-b", 1, "--json").out)
    assert (report["prompts"], report["new_tokens"]) == (6, 8)
    shown = specbuild("generate", copy, "-p", "import os", "-n", 8, "--json")
    assert (json.loads(shown.out)["metrics"]["speculation"], shown.err) == ("auto", "")
    assert specbuild("verify", copy, "-n", 8).status == 0
    assert "of the draft model" in specbuild("inspect", copy).out
    told = specbuild("bench", copy, "-t", 3, "--concurrency", "1,2", "--num-prompts", 2, "-n", 4)
    (line,) = [line for line in told.err.splitlines() if "tuned" in line]
    assert line.startswith(f"specbuild: {copy} was tuned with another thread count (")
    assert told.status == 0


def test_a_draft_that_loses_is_said_to(capsys: pytest.CaptureFixture[str]) -> None:
    speed = {"tree": "best:1", "speedup": 0.8, "measured": 0.7}
    tree = speed | {"accepted": 0.2, "seconds": 1e-3, "sequoia": {"accepted": 0.2}}
    command._show(speed | {"trees": [tree], "auto": 1.0, "greedy": {}, "sampled": {}})
    assert "the draft model loses here: best:1 promises 0.80× plain decoding" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--batch-sizes", "1,two"), "give whole numbers with commas"),
        (("--batch-sizes", "0"), "every size is at least 1"),
        (("--batch-sizes", "999"), "batch size 999 is not in 1…"),
        (("--threads", "0"), "threads must be 1…"),
        (("--prompts", "missing.jsonl"), "missing.jsonl cannot be read"),
        (("-n", "7"), "is not in the range x>=8"),
        (("--prompts", "empty.jsonl"), "empty.jsonl has no prompts"),
        (("--prompts", "bad.jsonl"), "bad.jsonl:2: not JSON"),
        (("--prompts", "blank.jsonl"), "blank.jsonl:3: the prompt is empty"),
        (("--prompts", "long.jsonl"), "long.jsonl:1: leaves no room for 16 tokens in 1024: give a shorter one"),
        (("--num-prompts", "0"), "is not in the range x>=1"),
    ],
)
def test_refusals(
    specbuild: Any, copy: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], reason: str
) -> None:
    monkeypatch.chdir(copy.parent)
    Path("empty.jsonl").write_text("\n")
    Path("bad.jsonl").write_text('{"prompt": "x"}\n{\n')
    Path("blank.jsonl").write_text('{"prompt": "x"}\n\n{"prompt": ""}\n')
    Path("long.jsonl").write_text(json.dumps({"prompt": " x" * 1018}))
    before = (copy / "manifest.json").read_bytes()
    assert reason in specbuild("tune", copy, *arguments).refusal()
    assert (copy / "manifest.json").read_bytes() == before


@pytest.mark.slow
def test_a_table_that_was_changed_is_refused(specbuild: Any, copy: Path) -> None:
    specbuild("tune", copy, "-n", 8)
    (copy / "timings.json").write_text("{}")
    assert "is not what was built" in specbuild("generate", copy, "-p", "x").refusal()
