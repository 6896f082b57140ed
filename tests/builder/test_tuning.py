"""Tuning: what is counted of drafts, what is fitted to it, and what a tuned bundle holds."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from specbuild.builder.tuning import tune as tuning
from specbuild.builder.tuning.chances import Record, _monotone, lookup_chances, note
from specbuild.builder.tuning.times import host_times
from specbuild.builder.tuning.tune import Tuning, tune
from specbuild.runtime import Bundle, Engine, RunStats, SamplingParams
from specbuild.runtime.errors import OptionError
from specbuild.runtime.growth import Growth
from specbuild.runtime.tree import Tree, TreeSpec

PROMPTS = ["def main(argv):\n", "import os\nimport sys\n\n"]


def grown() -> Growth:
    """A root with children 1, 2, 3 and a child 4 of 1; node 3 is in the pool and not in the tree."""
    pool = Tree([0, 11, 12, 13, 14], [-1, 0, 0, 0, 1], [0, 1, 1, 1, 2])
    scores = [0.0, -0.2, -1.0, -3.0, -0.5]
    return Growth(TreeSpec.parse("best:3"), pool, scores, [-1] * 5, kept=[0, 1, 2, 4])


def test_a_tree_is_noted_where_it_was_reached() -> None:
    record = Record()
    note(record, grown(), [0, 1])
    assert record.ranks == [(0, 0, True), (0, 1, False), (1, 0, False)]
    assert record.likelihoods == pytest.approx([-0.2, -1.0, -0.3])
    assert record.orders == [(3, [0])]
    note(record, grown(), [0])
    assert len(record.ranks) == 5
    note(record, grown(), [0, 1, 4])
    assert [record.accepted_of(nodes) for nodes in (1, 2, 3)] == [2 / 3, 1, 1]
    assert record.reach()[:4] == [0, 2 / 3, 1, 1]
    assert record.by_rank()[0][:2] == [2 / 3, 0]
    assert record.step() == (3 + 1) / (3 + 3 + 2)


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(1, 9)), min_size=1, max_size=12))
def test_pooled_shares_never_fall_and_keep_their_sum(trials: list[tuple[float, float]]) -> None:
    won, tried = [w for w, _ in trials], [t for _, t in trials]
    _, shares = _monotone(list(range(len(trials))), won, tried)
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(shares))
    assert np.dot(shares, tried) == pytest.approx(sum(won))


def test_a_calibration_says_what_came_true() -> None:
    rng, record = np.random.default_rng(0), Record()
    record.likelihoods = np.log(rng.uniform(0.05, 0.95, 20000)).tolist()
    record.accepted = [bool(rng.random() < np.exp(each) ** 2) for each in record.likelihoods]
    likely, chance = record.calibration()
    assert chance == pytest.approx(np.exp(2 * np.array(likely)), abs=0.05)
    assert record.error(likely, chance) < 0.02
    assert record.error([-3.0, 0.0], [0.5, 0.5]) > 0.15


def test_lookup_by_what_matched() -> None:
    """A text that repeats itself, and one whose every single match is followed by something else."""
    repeats = np.array([1, 2, 3, 4] * 20)
    never = np.array([9, *(token for i in range(10, 60) for token in (1, i))])
    good, bad = (lookup_chances([(text, 5)]) for text in (repeats, never))
    assert good[-1] > 0.9
    assert bad[1] < 0.1
    assert all(a <= b for a, b in itertools.pairwise(good))


def test_the_loops_own_times() -> None:
    plain, short, long = (RunStats(10, 10, 10 * (total + 3), 10.0, 20.0) for total in (0.1, 0.4, 0.4 + 7 * 0.2))
    found = host_times(plain, short, long, 8)
    assert found == pytest.approx({"plain": 0.1, "round": 0.2, "level": 0.2})


@pytest.fixture(scope="module")
def tuned(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A copy of the reference pair's bundle, and what tuning it found."""
    folder = tmp_path_factory.mktemp("tuned") / "b"
    shutil.copytree(bundle, folder)
    return folder, tune(folder, Tuning(PROMPTS, 24, [1, 2]))


def test_a_tuned_bundle(tuned: tuple[Path, dict[str, Any]], bundle: Path) -> None:
    folder, report = tuned
    assert sorted(p.name for p in folder.parent.iterdir()) == ["b"]
    before, after = Bundle.open(bundle), Bundle.open(folder)
    after.verify()
    assert after.manifest.files.keys() - before.manifest.files.keys() == {"costs.json"}
    assert json.loads((folder / "report.json").read_text())["tuning"] == json.loads(json.dumps(report))
    costs = json.loads((folder / "costs.json").read_text())
    assert list(costs["times"]) == ["1", "2"]
    assert [n for n, _ in costs["times"]["1"]["verify"]][-1] == before.manifest.buckets[-1] - 1
    assert [tree["tree"] for tree in report["trees"]] == [f"best:{n}" for n in (1, 2, 4, 8, 16, 32)]
    accepted = [tree["accepted"] for tree in report["trees"]]
    assert accepted == sorted(accepted)
    assert 0.3 < accepted[0] < 1 < accepted[-1]
    assert report["speedup"] == max(tree["speedup"] for tree in report["trees"])
    assert 0 <= report["greedy"]["calibration_error"] < 0.2


@pytest.mark.parametrize("drafter", [None, "model", "ngram"])
def test_a_tuned_bundle_gives_the_same_tokens(tuned: tuple[Path, dict[str, Any]], drafter: Any) -> None:
    texts = ["class Reader:\n", "for i in range(10):\n    print(i)\nfor i in range("]
    with Engine.load(tuned[0], drafter=drafter, batch_size=2) as engine:
        for temperature in (0.0, 0.8):
            params = SamplingParams(max_new_tokens=40, temperature=temperature, seed=3, ignore_eos=True)
            chosen = engine.generate(texts, params)
            off = engine.generate(texts, SamplingParams(**vars_of(params) | {"speculation": "off"}))
            assert [r.token_ids for r in chosen] == [r.token_ids for r in off]
            assert {r.metrics.speculation for r in chosen} == {"auto"}


def vars_of(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in SamplingParams.names()}


def test_a_table_of_another_machine_is_noticed(
    tuned: tuple[Path, dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Engine.load(tuned[0]).close()
    assert not caplog.records
    Engine.load(tuned[0], threads=3).close()
    assert "was tuned on another machine" in caplog.text
    assert "run specbuild tune" in caplog.text


def test_bundles_for_gpus_are_refused(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, tuned: tuple[Path, dict[str, Any]]
) -> None:
    from dataclasses import replace

    opened = Bundle.open(bundle)
    other = Bundle(bundle, replace(opened.manifest, backend="onnxruntime-cuda"))
    monkeypatch.setattr(tuning.Bundle, "open", lambda folder: other)
    with pytest.raises(OptionError, match="runs on onnxruntime-cuda: only bundles that run on a CPU can be tuned yet"):
        tune(bundle, Tuning(PROMPTS, 8, [1]))


def test_what_fails_leaves_the_bundle_as_it_was(
    tuned: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tuned[0]
    before = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    monkeypatch.setattr(tuning, "file_record", lambda path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tune(folder, Tuning(PROMPTS[:1], 8, [1]))
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()} == before
    assert sorted(p.name for p in folder.parent.iterdir()) == ["b"]
