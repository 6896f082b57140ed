"""Tuning: what is counted of drafts, what is fitted to it, and what a tuned bundle holds."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbuild.cli.tuned import in_words
from specbuild.measure.tuning import tune as tuning
from specbuild.measure.tuning.chances import Record, _monotone, begun, lookup_chances, note
from specbuild.measure.tuning.decode import Decoded, Decoder
from specbuild.measure.tuning.measure import Tuning
from specbuild.measure.tuning.times import host_times
from specbuild.measure.tuning.trees import measured, overall, promises
from specbuild.measure.tuning.tune import tune
from specbuild.runtime import Bundle, Engine, RunStats, SamplingParams
from specbuild.runtime.bundle.bundle import file_record
from specbuild.runtime.bundle.manifest import MANIFEST
from specbuild.runtime.errors import OptionError
from specbuild.runtime.requests.prompt_file import Request
from specbuild.runtime.speculation.timings import FILE, OLD_FILE, Times
from specbuild.runtime.speculation.tree import Tree, TreeSpec
from specbuild.runtime.speculation.tree_growth import Growth

PROMPTS = [Request(text, SamplingParams()) for text in ("def main(argv):\n", "import os\nimport sys\n\n")]


def grown() -> Growth:
    """A root with children 1, 2, 3 and a child 4 of 1; node 3 is in the pool and not in the tree."""
    pool = Tree([0, 11, 12, 13, 14], [-1, 0, 0, 0, 1], [0, 1, 1, 1, 2])
    scores = [0.0, -0.2, -1.0, -3.0, -0.5]
    return Growth(TreeSpec.parse("best:3"), pool, scores=scores, rows=[-1] * 5, kept=[0, 1, 2, 4])


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
    assert record.error() < 0.02


def test_the_calibration_error_is_of_trials_that_were_not_calibrated_with() -> None:
    record = Record([-1.0, -0.5] * 200, [True] * 200 + [False] * 200)
    assert record.error() > 0.9
    assert Record([-1.0] * 2000, [True] * 2000).error() < 0.02
    assert Record([-1.0], [True]).error() is None


def test_lookup_by_what_matched() -> None:
    """A text that repeats itself, and one whose every single match is followed by something else."""
    repeats = np.array([1, 2, 3, 4] * 20)
    never = np.array([9, *(token for i in range(10, 60) for token in (1, i))])
    good, bad = (lookup_chances([(text, 5)]) for text in (repeats, never))
    assert good[-1] > 0.9
    assert bad[1] < 0.1
    assert all(a <= b for a, b in itertools.pairwise(good))


def test_the_loops_own_times() -> None:
    found = host_times([0.1, 0.4, 0.9, 0.4 + 6.5 * 0.2], 7.5)
    assert found == pytest.approx({"plain": 0.1, "round": 0.2, "level": 0.2})
    assert host_times([0.1], 1) == {"plain": 0.1, "round": 0.1, "level": 0}


def decoded(rounds: int, tokens: int, verify: float, around: float = 0.0) -> Decoded:
    """A text whose rounds took `verify` and, half for the draft and half for the loop, `around`."""
    seconds = [each * rounds for each in (verify + around, around / 2, verify)]
    return Decoded(SimpleNamespace(), RunStats(rounds, tokens, *seconds))  # type: ignore[arg-type]


def test_what_trees_promise() -> None:
    """By two prompts; best:8 lies between the probes of 4 and 32 nodes, a third of the way in powers of two."""
    texts = [
        {"off": decoded(10, 10, slow)}
        | {f"best:{n}": decoded(5, 9, slow * (1 + n), slow * t) for n, t in ((1, 0.2), (4, 0.8), (32, 1.4))}
        for slow in (1.0, 3.0, 1.0)
    ]
    records = [[Record(orders=[(32, [0, 3])])] * 5, [Record(orders=[(32, [0, 1, 2, 6])]), Record(orders=[(32, [])])]]
    table = {"verify": [[n, float(n)] for n in (1, 2, 64)], "draft": [], "plain": 0.5, "round": 9.0, "level": 9.0}
    found = {tree["nodes"]: tree for tree in promises(texts, records, Times.of(table, 64), 63)}
    assert [found[n]["seconds"] for n in (1, 2, 4, 8, 32)] == pytest.approx([2.2, 3.5, 5.8, 10.0, 34.4])
    # Rounds of best:1 begin at tokens 0, 2, 4 of the first text, and 0 of the second: each accepts one.
    assert (found[1]["accepted"], found[1]["speedup"]) == pytest.approx((1, 2 * 1.5 / 2.2))
    assert (found[4]["accepted"], found[4]["speedup"]) == pytest.approx((7 / 3, (10 / 3) * 1.5 / 5.8))
    assert found[8]["accepted"] == pytest.approx(8 / 3)
    assert [promise["tree"] for promise in promises(texts, records, Times.of(table, 64), 5)][-2:] == [
        "best:4",
        "best:5",
    ]


def test_what_trees_bring_whatever_slows_a_prompt() -> None:
    texts = [{"off": decoded(10, 10, slow), "auto": decoded(5, 20, 2 * slow)} for slow in (1.0, 5.0, 1.0)]
    assert measured(texts, "auto") == overall(texts, "auto") == pytest.approx(2.0)
    texts[0]["auto"] = decoded(5, 20, 9.0)  # something else ran meanwhile
    assert measured(texts, "auto") == pytest.approx(2.0)
    assert overall(texts, "auto") == pytest.approx(60 / 65)


def test_a_tuning_in_words() -> None:
    assert in_words(None) == []
    assert in_words({"auto": 1.5}) == ["auto 1.50× plain decoding, measured; there is no draft, lookup alone is tuned"]
    found = {"auto": 0.9, "tree": "best:1", "speedup": 0.8, "measured": 0.85}
    choice, model, whole = in_words(found)
    assert choice == "auto 0.90× plain decoding, measured; best:1 of the draft model 0.80×, measured 0.85×"
    assert model == "the draft model loses here: best:1 promises 0.80× plain decoding"
    assert "speculation loses here" in whole


def test_rounds_begin_where_the_last_one_ended() -> None:
    records = [Record(orders=[(3, ranks)]) for ranks in ([0, 2], [], [0], [], [1])]
    assert begun(records, 1) == [records[0], records[2], records[4]]
    assert begun(records, 3) == [records[0], records[3], records[4]]


def test_a_replayed_text_tells_what_was_accepted(bundle: Path) -> None:
    """Of rounds with such trees, decoded for real: as many, with as many tokens in all, greedy and sampled."""
    with Engine.load(bundle, prefix_caching=False) as engine, engine.scheduler.exclusive() as loop:
        decoder, prompt = Decoder(engine, loop, 40), engine.tokenizer.encode("def main(argv):\n")
        for temperature in (0.0, 0.8):
            plain = decoder.decode(prompt, "off", temperature)
            every, along = (decoder.replay(plain, "best:16", every=each) for each in (True, False))
            real = decoder.decode(prompt, "best:16", temperature)
            assert [record.orders for record in begun(every, 16)] == [record.orders for record in along]
            assert len(along) == real.stats.rounds
            assert sum(1 + record.accepted_of(16) for record in along) == real.stats.emitted


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
    assert after.manifest.files.keys() - before.manifest.files.keys() == {"timings.json"}
    assert json.loads((folder / "report.json").read_text())["tuning"] == json.loads(json.dumps(report))
    timings = json.loads((folder / "timings.json").read_text())
    assert list(timings["times"]) == ["1", "2"]
    assert [n for n, _ in timings["times"]["1"]["verify"]] == [1, 2, 3, 4, 5, 6, 7, 9, 12, 17, 24, 33, 48, 64]
    assert [n for n, _ in timings["times"]["2"]["draft"]] == [1, 2, 3, 5, 9, 17, 33, 64]
    assert [tree["tree"] for tree in report["trees"]] == [f"best:{n}" for n in (1, 2, 4, 8, 16, 32)]
    accepted = [tree["accepted"] for tree in report["trees"]]
    assert accepted == sorted(accepted)
    assert 0.3 < accepted[0] < 1 < accepted[-1]
    best = max(report["trees"], key=lambda tree: tree["speedup"])
    assert all(report[name] == best[name] for name in ("tree", "speedup", "measured"))
    assert all(tree["measured"] > 0 for tree in report["trees"])
    assert report["auto"] > 0
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
    monkeypatch.setattr(Bundle, "open", lambda folder: other)
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


@pytest.mark.slow
def test_a_bundle_that_was_tuned_before_schema_2(tuned: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Its table has another name: it is read, and replaced when the bundle is tuned again."""
    folder = Path(shutil.copytree(tuned[0], tmp_path / "b"))
    table = json.loads((folder / FILE).read_text()) | {"schema": 1}
    (folder / FILE).unlink()
    (folder / OLD_FILE).write_text(json.dumps(table))
    manifest = Bundle.open(tuned[0]).manifest
    files = {name: record for name, record in manifest.files.items() if name != FILE}
    old = replace(manifest, schema_version=2, files=files | {OLD_FILE: file_record(folder / OLD_FILE)})
    (folder / MANIFEST).write_text(old.to_json())
    with Engine.load(folder) as engine:
        (result,) = engine.generate("class Reader:\n", SamplingParams(max_new_tokens=8, seed=0))
    assert result.metrics.speculation == "auto"
    tune(folder, Tuning(PROMPTS, 24, [1]))
    again = Bundle.open(folder)
    again.verify()
    assert again.manifest.files.keys() == manifest.files.keys()
    assert again.manifest.schema_version == manifest.schema_version
    assert not (folder / OLD_FILE).exists()
