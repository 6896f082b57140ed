"""`specbuild pair`: what it prints, what it refuses, and that it leaves nothing behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from specbuild.cli import pair as command


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "import os\\n"}\n{"prompt": "x = ", "temperature": 1.0}\n')
    return file


def test_a_model_is_weighed_as_its_own_draft(
    specbuild: Any,
    tiny: Path,
    scratch: Path,
    prompts: Path,
    quick_export: None,
    capfd: pytest.CaptureFixture[str],
) -> None:
    few = "--prompts", prompts, "--num-prompts", 1, "-n", 16
    outcome = specbuild("pair", tiny, tiny, *few, "--temperature", 0, "--temp", 0.5, "--json")
    assert (outcome.status, outcome.err) == (0, "")
    assert list(scratch.iterdir()) == []
    report = json.loads(outcome.out)
    expected = {"kind": "identical", "rows": 4096, "columns": 4096, "shared": 4096, "mask_token": None}
    assert report["vocabulary"] == expected | {"of": 4096, "covered": 1.0}
    assert (report["prompts"], report["new_tokens"]) == (1, 16)
    assert report["step_ratio"] == report["step_seconds"]["draft"] / report["step_seconds"]["target"] > 0
    assert [each["temperature"] for each in report["temperatures"]] == [0.0, 0.5]
    for each in report["temperatures"]:
        assert each["accepted"] == each["accepted_cumulative"] == [1.0] * 8
        assert min(each["speedup"], each["auto"], each["lookup"]) > 0
    command._show(report | {"verdict": "worth it", "reasons": ["it is cheap"]})
    lines = [line.strip() for line in capfd.readouterr().out.splitlines()]
    assert lines[0] == "vocabulary  identical: 4096 of 4096 tokens, 100.0% of the prompts'"
    assert lines[3].split() == ["0", "where", "reached", *["1.00"] * 8]
    assert lines[6].split() == ["of", "all", *["1.00"] * 8]
    assert lines[8].split()[:2] == ["0", report["temperatures"][0]["tree"]]
    assert lines[-2:] == ["worth it", "it is cheap"]


def test_nothing_is_left_of_a_failure(
    specbuild: Any, tiny: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specbuild.builder.pair import measure

    def build(config: Any, progress: Any) -> None:
        config.output.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "build", build)
    assert "interrupted: nothing half-done was left behind" in specbuild("pair", tiny, tiny).refusal(1)
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("missing",), "missing does not exist"),
        ((".", "--temperature", "-1"), "temperature must be"),
        ((".", "--num-prompts", "0"), "is not in the range x>=1"),
        ((".", "--prompts", "missing.jsonl"), "missing.jsonl cannot be read"),
        ((".", "-n", "8"), "is not in the range x>=16"),
        ((".", "--threads", "0"), "0 is not in the range x>=1"),
    ],
)
def test_refusals(
    specbuild: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch, scratch: Path, arguments: tuple[str, ...], reason: str
) -> None:
    monkeypatch.chdir(tiny)
    assert reason in specbuild("pair", ".", *arguments).refusal()
    assert list(scratch.iterdir()) == []


def test_a_draft_that_cannot_be_used(specbuild: Any, tiny: Path, tmp_path: Path) -> None:
    draft = Path(shutil.copytree(tiny, tmp_path / "draft"))
    content = json.loads((draft / "tokenizer.json").read_text(encoding="utf-8"))
    content["model"] = {"type": "WordLevel", "vocab": {"<|endoftext|>": 0, "Fuchs": 1, "def": 2}, "unk_token": "Fuchs"}
    (draft / "tokenizer.json").write_text(json.dumps(content))
    line = specbuild("pair", tiny, draft).refusal()
    assert "different vocabularies of 4096 and 3 tokens, and share only 2: use a draft with the target's" in line
