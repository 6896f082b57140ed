"""`specbuild tune`: what it prints and refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from specbuild.builder.cli import tune as command


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "b"))


def test_a_table_and_what_follows_from_it(specbuild: Any, copy: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "import os\\n"}\n{"prompt": "x = ", "temperature": 1.0}\n')
    outcome = specbuild("tune", copy, "--prompts", prompts, "--num-prompts", 1, "-n", 12)
    assert (outcome.status, outcome.err.splitlines()[0]) == (0, "steps of batch 1")
    assert [line.split()[0] for line in outcome.out.splitlines()[1:7]] == [f"best:{n}" for n in (1, 2, 4, 8, 16, 32)]
    assert "calibration error" in outcome.out
    report = json.loads(specbuild("tune", copy, "-n", 8, "--json").out)
    assert (report["prompts"], report["new_tokens"]) == (len(command.PROMPTS), 8)
    shown = specbuild("generate", copy, "-p", "import os", "-n", 8, "--json")
    assert (json.loads(shown.out)["metrics"]["speculation"], shown.err) == ("auto", "")
    assert specbuild("verify", copy, "-n", 8).status == 0


def test_a_draft_that_loses_is_said_to(capsys: pytest.CaptureFixture[str]) -> None:
    tree = {"tree": "best:1", "accepted": 0.2, "seconds": 1e-3, "speedup": 0.8, "sequoia": {"accepted": 0.2}}
    command._show({"trees": [tree], "tree": "best:1", "speedup": 0.8, "greedy": {}, "sampled": {}})
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
    ],
)
def test_refusals(specbuild: Any, copy: Path, arguments: tuple[str, ...], reason: str) -> None:
    before = (copy / "manifest.json").read_bytes()
    assert reason in specbuild("tune", copy, *arguments).refusal()
    assert (copy / "manifest.json").read_bytes() == before


def test_a_table_that_was_changed_is_refused(specbuild: Any, copy: Path) -> None:
    specbuild("tune", copy, "-n", 8)
    (copy / "costs.json").write_text("{}")
    assert "is not what was built" in specbuild("generate", copy, "-p", "x").refusal()
