"""The result and its files: made-up turns with known sums, tables, and where files may go."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specbuild.measure.bench import html
from specbuild.measure.bench.measure import Sample, Turn
from specbuild.measure.bench.report import check, tables
from specbuild.measure.bench.result import build
from specbuild.runtime import Bundle, RunStats, SpeculationStats
from specbuild.runtime.bundle.manifest import FileRecord
from specbuild.runtime.errors import OutputError


def sample(category: str, tokens: int, ttft: float, later: float, accepted: int | None = None) -> Sample:
    drafting = SpeculationStats()
    if accepted is not None:
        drafting.record(4, accepted, 4)
    gaps = [later / (tokens - 1)] * (tokens - 1) if tokens > 1 else []
    return Sample(category, list(range(tokens)), ttft, ttft + later, gaps, drafting)


@pytest.fixture
def result(bundle: Path) -> Any:
    stats = RunStats(rounds=4, emitted=6, total=1.0, draft=0.1, verify=0.5, accept=0.06, commit=0.04)
    plain = [
        Turn([sample("math", 3, 1.0, 4.0)], 5.0, stats),
        Turn([sample("qa", 1, 1.0, 0.0)], 1.0, stats),
    ]
    drafted = [
        Turn([sample("math", 3, 1.0, 1.0, 3)], 2.0, stats),
        Turn([sample("qa", 1, 1.0, 0.0)], 1.0, RunStats(rounds=1, emitted=1, total=0.25)),
    ]
    return build(Bundle.open(bundle), "specbuild bench", {"seed": 0}, {1: {"off": plain, "chain:4": drafted}})


def test_sums_and_ratios(result: Any) -> None:
    plain, drafted = result["runs"]
    assert (plain["speculation"], plain["tree"], plain["nodes"], plain["speculative_decoding"]) == (
        "off",
        None,
        0,
        None,
    )
    assert (drafted["tree"], drafted["nodes"], drafted["completed"], drafted["total_output_tokens"]) == (
        "chain:4",
        4,
        2,
        4,
    )
    assert (drafted["duration"], drafted["output_throughput"]) == (3.0, 4 / 3)
    assert drafted["wall_speedup"]["value"] == pytest.approx(2.0)  # 6 s over 3 s
    assert drafted["decode_speedup"] == {"value": pytest.approx(4.0), "low": None, "high": None}  # one has decoded
    assert plain["wall_speedup"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert drafted["outputs_equal_to_baseline"] == 2
    assert (drafted["mean_tpot_ms"], drafted["mean_ttft_ms"], drafted["mean_e2el_ms"]) == (500, 1000, 1500)


def test_a_tuned_bundle_has_no_tree_of_its_own_but_a_timing_table(bundle: Path, tmp_path: Path) -> None:
    opened, turns = Bundle.open(bundle), [Turn([sample("qa", 2, 1.0, 1.0, 3)], 2.0, RunStats(1, 2, 1.0))]
    measured = {1: {"off": turns, "chain:4": turns, "auto": turns}}
    files = opened.manifest.files | {"timings.json": FileRecord(0, "")}
    (tmp_path / "manifest.json").write_bytes((bundle / "manifest.json").read_bytes())
    steps = {"verify": [[1, 0.5], [64, 2.0]], "draft": [[1, 0.1], [64, 0.2]]}
    (tmp_path / "timings.json").write_text(json.dumps({"times": {"1": steps, "2": steps}}))
    tuned = Bundle(tmp_path, replace(opened.manifest, files=files))
    for each, tree, title in ((opened, ("best:5", 5), "auto 5 nodes"), (tuned, ("policy", None), "auto what pays")):
        result = build(each, "specbuild bench", {"seed": 0}, measured)
        assert [(run["tree"], run["nodes"]) for run in result["runs"]] == [(None, 0), ("chain:4", 4), tree]
        labels = re.findall(r"<text[^>]*>(?:<tspan[^>]*>)?([^<]+)", html.render(result))
        assert title in " ".join(labels)
        assert " ".join(labels).index("chain:4") < " ".join(labels).index("auto")
        found = {"T_verify, ms", "T_draft, ms", "batch 2"} <= set(labels)
        assert found == (each is tuned) == ("Timing table" in html.render(result))
    assert result["bundle"]["timings"]["2"] == steps


def test_a_round_is_the_sum_of_its_parts(result: Any) -> None:
    found = result["runs"][1]["round"]
    assert (found["rounds"], found["tokens"], found["total_ms"]) == pytest.approx((5, 1.4, 250))
    parts = [found[f"{part}_ms"] for part in ("draft", "verify", "accept", "commit", "host")]
    assert parts == pytest.approx([20, 100, 12, 8, 110])


def test_categories_are_told_apart(result: Any) -> None:
    math, qa = result["runs"][1]["categories"].values()
    assert (math["completed"], math["decode_speedup"]["value"]) == (1, pytest.approx(4.0))
    assert math["speculative_decoding"]["mean_acceptance_length"] == 4
    assert (qa["decode_speedup"]["value"], qa["speculative_decoding"], qa["mean_tpot_ms"]) == (None, None, None)


def test_tables(result: Any) -> None:
    found = {title: (header, rows) for title, header, rows in tables(result)}
    assert all(len(row) == len(header) for header, rows in found.values() for row in rows)
    assert [row[:2] for row in found["a round in ms"][1]] == [["1", "off"], ["1", "chain:4"]]
    assert [row[2:4] for row in found["accepted tokens, rates by depth"][1]] == [["4.00", "4.00"]]
    assert len(found["by category"][1]) == 4


def test_a_result_knows_its_bundle(result: Any, bundle: Path) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))
    assert result["bundle"]["digest"] == manifest["digest"]
    assert set(result["bundle"]["models"]) == {"target", "draft"}


def test_where_a_file_cannot_go(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no" / "x.json"):
        with pytest.raises(OutputError):
            check(path)
    check(tmp_path / "x.json")
    assert list(tmp_path.iterdir()) == []
