"""`specbuild bench`: one real run with every output, and what it refuses before it measures."""

import json
import sys

import pytest
from html_page import Page


def questions(tmp_path, *categories):
    path = tmp_path / "question.jsonl"
    lines = [{"category": name, "turns": [f"import {name[:2]}", "x"]} for name in categories]
    numbered = [{"question_id": number} | line for number, line in enumerate(lines)]
    path.write_text("".join(json.dumps(line) + "\n" for line in numbered), encoding="utf-8")
    return path


@pytest.mark.slow
def test_one_run_and_all_its_outputs(specbuild, bundle, tmp_path):
    path = questions(tmp_path, "os <b>", "re & io", "os <b>")
    asked = ["--prompts", "spec_bench", "--dataset-path", path, "-n", 6, "--ignore-eos", "--concurrency", "2,1"]
    outputs = ["-o", tmp_path / "result.json", "--html", tmp_path / "report.html"]
    outcome = specbuild("bench", bundle, *asked, "--trees", "chain:3", "--json", *outputs)
    assert (outcome.status, outcome.err) == (0, "")
    result = json.loads(outcome.out)
    assert (tmp_path / "result.json").read_text(encoding="utf-8") == outcome.out
    assert sorted(each.name for each in tmp_path.iterdir()) == ["question.jsonl", "report.html", "result.json"]
    runs = [(run["concurrency"], run["speculation"]) for run in result["runs"]]
    assert runs == [(count, name) for count in (1, 2) for name in ("off", "auto", "chain:3")]
    for run in result["runs"]:
        assert (run["completed"], run["total_output_tokens"], run["outputs_equal_to_baseline"]) == (6, 36, 6)
        assert list(run["categories"]) == ["os <b>", "re & io"]
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    for shown in ("os <b>", result["command"], result["settings"]["turns"]):
        assert shown in page.text
    shown = specbuild("bench", bundle, "--num-prompts", 1, "-n", 2).out
    assert all(words in shown for words in ("output tokens/s, speedup", "latency in ms", "a round in ms", "1 of 1"))


@pytest.mark.slow
def test_plots_need_their_package(specbuild, tiny_bundle, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    outcome = specbuild("bench", tiny_bundle, "--html", tmp_path / "r.html")
    assert "pip install 'specbuild-trt[bench]'" in outcome.refusal()
