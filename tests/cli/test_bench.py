"""`specbuild bench`: one real run with every output, and what it refuses before it measures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import Specbuild
from html_page import Page

QUICK = ("--num-prompts", 2, "-n", 6)


def questions(tmp_path: Path, *categories: str) -> Path:
    path = tmp_path / "question.jsonl"
    lines = [{"category": name, "turns": [f"import {name[:2]}", "x"]} for name in categories]
    numbered = [{"question_id": number} | line for number, line in enumerate(lines)]
    path.write_text("".join(json.dumps(line) + "\n" for line in numbered), encoding="utf-8")
    return path


@pytest.mark.slow
def test_one_run_and_all_its_outputs(specbuild: Specbuild, bundle: Path, tmp_path: Path) -> None:
    path = questions(tmp_path, "os <b>", "re & io", "os <b>")
    asked = ["--prompts", "spec_bench", "--dataset-path", path, "-n", 6, "--ignore-eos", "--concurrency", "2,1"]
    outputs = ["-o", tmp_path / "result.json", "--html", tmp_path / "report.html"]
    outcome = specbuild("bench", bundle, *asked, "--trees", "chain:3", "--json", *outputs)
    assert (outcome.status, outcome.err) == (0, "")
    result = json.loads(outcome.out)
    assert (tmp_path / "result.json").read_text(encoding="utf-8") == outcome.out
    assert sorted(each.name for each in tmp_path.iterdir()) == ["question.jsonl", "report.html", "result.json"]
    turns = "all, as text, after a blank line; earlier answers are plain decoding's, for every contender"
    assert (result["settings"]["num_prompts"], result["settings"]["turns"]) == (6, turns)
    runs = [(run["concurrency"], run["speculation"]) for run in result["runs"]]
    assert runs == [(count, name) for count in (1, 2) for name in ("off", "auto", "chain:3")]
    for run in result["runs"]:
        assert (run["completed"], run["total_output_tokens"], run["outputs_equal_to_baseline"]) == (6, 36, 6)
        assert list(run["categories"]) == ["os <b>", "re & io"]
        assert (run["speculative_decoding"] is None) == (run["speculation"] == "off")
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.tags.count("svg") == 1 + 2 * 3
    assert "b" not in page.tags
    for shown in ("os <b>", "Speedup by tree size", "conditional acceptance rate", result["command"], turns):
        assert shown in page.text


@pytest.mark.nightly
def test_tables_without_a_draft(specbuild: Specbuild, tiny_bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a a a a"}\n\n{"prompt": "b b", "max_new_tokens": 4}\n', encoding="utf-8")
    outcome = specbuild("bench", tiny_bundle, "--prompts", path, "--trees", "topk:2,2", *QUICK)
    assert (outcome.status, outcome.err) == (0, "")
    for shown in ("output tokens/s, speedup", "latency in ms", "a round in ms", "2 of 2", "1.00×", "topk:2,2"):
        assert shown in outcome.out
    assert "by category" not in outcome.out
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_questions_go_through_the_chat_template(specbuild: Specbuild, tiny_bundle: Path, tmp_path: Path) -> None:
    asked = ["--prompts", "spec_bench", "--dataset-path", questions(tmp_path, "os", "re"), "-n", 1]
    outcome = specbuild("bench", tiny_bundle, *asked)
    assert (outcome.status, outcome.err) == (0, "")
    said = " ".join(outcome.out.split())
    assert "turns: all, as user messages of the chat template; earlier answers are plain decoding's" in said
    assert "4 of 4 prompts ended after one token: a speedup on them means nothing" in said


@pytest.mark.slow
def test_plots_need_their_package(specbuild: Specbuild, tiny_bundle: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    outcome = specbuild("bench", tiny_bundle, "--html", tmp_path / "r.html")
    assert "pip install 'specbuild-trt[bench]'" in outcome.refusal()
