"""`specbuild bench`: one real run with every output, and what it refuses before it measures."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]
QUICK = ("--num-prompts", 2, "-n", 6)
LATENCIES = [f"{mark}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for mark in ("mean", "p50", "p95", "p99")]
RUN = [
    *("concurrency", "speculation", "tree", "nodes", "completed", "total_output_tokens", "ended_after_one_token"),
    *("outputs_equal_to_baseline", "duration", "output_throughput", "wall_speedup", "decode_speedup", *LATENCIES),
    *("speculative_decoding", "round", "categories"),
]
DRAFTED = [
    *("mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "num_spec_steps", "num_draft_tokens"),
    *("num_accepted_draft_tokens", "num_unsettled_steps", "num_recomputed_tokens", "decisions"),
    *("macro_mean_acceptance_length", "acceptance_rate_per_position"),
    "conditional_acceptance_rate",
]


class Page(HTMLParser):
    """What a page shows, and what it points to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.targets: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.targets += [value or "" for name, value in attrs if name.split(":")[-1] in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


def questions(tmp_path: Path, *categories: str) -> Path:
    path = tmp_path / "question.jsonl"
    lines = [
        {"question_id": i, "category": name, "turns": [f"import {name[:2]}", "x"]} for i, name in enumerate(categories)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_one_run_and_all_its_outputs(specbuild: Command, bundle: Path, tmp_path: Path) -> None:
    path = questions(tmp_path, "os <b>", "re & io", "os <b>")
    asked = ["--prompts", "spec_bench", "--dataset-path", path, "-n", 6, "--ignore-eos", "--concurrency", "2,1"]
    outputs = ["-o", tmp_path / "result.json", "--html", tmp_path / "report.html"]
    outcome = specbuild("bench", bundle, *asked, "--trees", "topk:2,2,chain:3", "--json", *outputs)
    assert (outcome.status, outcome.err) == (0, "")
    result = json.loads(outcome.out)
    assert (tmp_path / "result.json").read_text(encoding="utf-8") == outcome.out
    assert sorted(each.name for each in tmp_path.iterdir()) == ["question.jsonl", "report.html", "result.json"]

    assert list(result) == ["schema_version", "command", "machine", "bundle", "settings", "runs"]
    assert list(result["machine"]) == ["cpu", "cores", "platform", "python", "versions"]
    assert result["settings"]["num_prompts"] == 6
    turns = "all, as text, after a blank line; earlier answers are plain decoding's, for every contender"
    assert result["settings"]["turns"] == turns
    names = ["off", "auto", "topk:2,2", "chain:3"]
    assert [(run["concurrency"], run["speculation"]) for run in result["runs"]] == [
        (c, n) for c in (1, 2) for n in names
    ]
    for run in result["runs"]:
        assert list(run) == RUN
        assert (run["completed"], run["total_output_tokens"], run["outputs_equal_to_baseline"]) == (6, 36, 6)
        assert run["ended_after_one_token"] == 0
        assert run["p50_itl_ms"] <= run["p95_itl_ms"] <= run["p99_itl_ms"]
        assert list(run["categories"]) == ["os <b>", "re & io"]
        assert (run["speculative_decoding"] is None) == (run["speculation"] == "off")
        parts = run["round"]
        assert parts["total_ms"] == pytest.approx(
            sum(parts[f"{p}_ms"] for p in ("draft", "verify", "accept", "commit", "host"))
        )
        assert parts["accept_ms"] > 0 < parts["commit_ms"]
        if run["speculative_decoding"]:
            assert list(run["speculative_decoding"]) == DRAFTED
            assert all(0 <= rate <= 1 for rate in run["speculative_decoding"]["acceptance_rate_per_position"])

    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.tags.count("svg") == 1 + 2 * 3
    assert page.tags.count("table") == 5
    assert not {"script", "link", "img", "b"} & set(page.tags)
    assert all(target.startswith("#") for target in page.targets)
    assert "http" not in (tmp_path / "report.html").read_text(encoding="utf-8")
    for shown in (
        "os <b>",
        "Speedup by tree size",
        "conditional acceptance rate",
        "E2EL, ms",
        result["command"],
        turns,
    ):
        assert shown in page.text


@pytest.mark.slow
def test_tables_without_a_draft(specbuild: Command, tiny_bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a a a a"}\n\n{"prompt": "b b", "max_new_tokens": 4}\n', encoding="utf-8")
    outcome = specbuild("bench", tiny_bundle, "--prompts", path, "--trees", "topk:2,2", *QUICK)
    assert (outcome.status, outcome.err) == (0, "")
    for shown in ("output tokens/s, speedup", "latency in ms", "a round in ms", "2 of 2", "1.00×", "topk:2,2"):
        assert shown in outcome.out
    assert "by category" not in outcome.out
    assert list(tmp_path.iterdir()) == [path]


def test_questions_go_through_the_chat_template(specbuild: Command, tiny_bundle: Path, tmp_path: Path) -> None:
    asked = ["--prompts", "spec_bench", "--dataset-path", questions(tmp_path, "os", "re"), "-n", 1]
    outcome = specbuild("bench", tiny_bundle, *asked)
    assert (outcome.status, outcome.err) == (0, "")
    said = " ".join(outcome.out.split())
    assert "turns: all, as user messages of the chat template; earlier answers are plain decoding's" in said
    assert "4 of 4 prompts ended after one token: a speedup on them means nothing" in said


def test_an_interrupt_leaves_nothing(
    specbuild: Command, tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specbuild.cli import bench

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "measure", interrupted)
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n', encoding="utf-8")
    outcome = specbuild(
        "bench", tiny_bundle, "--prompts", path, "-o", tmp_path / "r.json", "--html", tmp_path / "r.html"
    )
    assert "interrupted" in outcome.refusal(1)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--num-prompts", 0), "--num-prompts"),
        (("--num-prompts", 33), "more than the 32 prompts of pycode"),
        (("--concurrency", "2"), "concurrency 2 is more than the 1 sequences"),
        (("--concurrency", "1;2"), "not a list of whole numbers"),
        (("--trees", "star:3"), "unknown tree 'star:3'"),
        (("--trees", "chain:64"), "verifies at most 63"),
        (("--drafter", "model"), "has no draft"),
        (("--temperature", "-1"), "specbuild: temperature must be"),
        (("--seed", "-1"), "seed must be"),
        (("-n", 0), "max_new_tokens must be"),
        (("--prompts", "spec_bench"), "--dataset-path"),
        (("--dataset-path", "x"), "--prompts spec_bench"),
        (("--prompts", "none.jsonl"), "none.jsonl cannot be read"),
        (("--prompts", "empty.jsonl"), "empty.jsonl has no prompts"),
        (("--prompts", "bad.jsonl"), "bad.jsonl:2: not JSON"),
        (("--prompts", "blank.jsonl"), "blank.jsonl:3: the prompt is empty"),
        (("-o", "none/result.json"), "none/result.json cannot be written"),
        (("--html", "."), "is not a file"),
        (("-o", "x", "--html", "./x"), "one file"),
    ],
)
def test_bad_input(
    specbuild: Command, tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Any, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.jsonl").write_text("\n")
    Path("bad.jsonl").write_text('{"prompt": "x"}\n{\n')
    Path("blank.jsonl").write_text('{"prompt": "x"}\n\n{"prompt": ""}\n')
    before = sorted(tmp_path.iterdir())
    assert words in specbuild("bench", tiny_bundle, *options).refusal()
    assert sorted(tmp_path.iterdir()) == before


def test_fewer_prompts_than_run_at_a_time(specbuild: Command, bundle: Path) -> None:
    assert "never make a concurrency of 4" in specbuild("bench", bundle, "--concurrency", 4, *QUICK).refusal()


def test_plots_need_their_package(specbuild: Command, tiny_bundle: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    outcome = specbuild("bench", tiny_bundle, "--html", tmp_path / "r.html")
    assert "pip install 'specbuild-trt[bench]'" in outcome.refusal()


def test_no_bundle(specbuild: Command, tmp_path: Path) -> None:
    assert "not a folder" in specbuild("bench", tmp_path / "none").refusal()
