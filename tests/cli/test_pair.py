"""`specbuild pair`: what it prints, what it refuses, and that it leaves nothing behind."""

import json

import pytest

from specbuild.builder.pair import measure


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
    """Where temporary folders are made."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("quick_export")
def test_a_model_is_weighed_as_its_own_draft(specbuild, tiny, scratch, tmp_path, monkeypatch):
    (tmp_path / "p.jsonl").write_text('{"prompt": "import os\\n"}\n{"prompt": "x = ", "temperature": 1.0}\n')
    asked = ("pair", tiny, tiny, "--prompts", tmp_path / "p.jsonl", "--num-prompts", 1, "-n", 16)
    outcome = specbuild(*asked, "--temperature", 0, "--temp", 0.5, "--json")
    assert (outcome.status, outcome.err) == (0, "")
    assert list(scratch.iterdir()) == []
    report = json.loads(outcome.out)
    assert (report["vocabulary"]["shared"], report["prompts"], report["new_tokens"]) == (4096, 1, 16)
    assert report["step_ratio"] == report["step_seconds"]["draft"] / report["step_seconds"]["target"] > 0
    assert [each["temperature"] for each in report["temperatures"]] == [0.0, 0.5]
    assert all(each["accepted"] == each["accepted_cumulative"] == [1.0] * 8 for each in report["temperatures"])
    monkeypatch.setattr(measure, "weigh", lambda *_: report | {"verdict": "worth it", "reasons": ["it is cheap"]})
    lines = [line.strip() for line in specbuild(*asked).out.splitlines()]
    assert lines[0] == "vocabulary  identical: 4096 of 4096 tokens, 100.0% of the prompts'"
    assert lines[3].split() == ["0", "where", "reached", *["1.00"] * 8]
    assert lines[-2:] == ["worth it", "it is cheap"]


def test_nothing_is_left_of_a_failure(specbuild, tiny, scratch, monkeypatch):
    def build(config, progress):
        config.output.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "build", build)
    assert "interrupted: nothing half-done was left behind" in specbuild("pair", tiny, tiny).refusal(1)
    assert list(scratch.iterdir()) == []
