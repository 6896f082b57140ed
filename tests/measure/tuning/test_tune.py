"""Tuning writes a timing table into a bundle, which decodes the same tokens by it; what fails changes nothing."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from specbuild.measure.tuning import tune as tuning
from specbuild.measure.tuning.decode import AUTO, OFF, Decoder
from specbuild.measure.tuning.measure import Tuning
from specbuild.measure.tuning.tune import tune
from specbuild.runtime import Bundle
from specbuild.runtime.speculation.tree import TreeSpec

TIME_IS_UP = Tuning(new_tokens=24, batch_sizes=[1, 2], seconds=0.0)


@dataclass(frozen=True)
class Tuned:
    """A copy of the reference pair's bundle, what tuning it found, what it told, and what it decoded in which order."""

    folder: Path
    report: dict[str, Any]
    progress: list[tuple[str, int, int]]
    order: list[tuple[list[int], str]]


@pytest.fixture(scope="module")
def tuned(bundle, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned") / "b"
    shutil.copytree(bundle, folder)
    progress = []
    order = []
    decode = Decoder.decode

    def seen(self, prompt, name, temperature=0.0, **more):
        if not temperature:
            order.append((prompt, name))
        return decode(self, prompt, name, temperature, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "decode", seen)
        report = tune(folder, TIME_IS_UP, lambda *told: progress.append(told))
    return Tuned(folder, report, progress, order)


@pytest.mark.slow
def test_a_tuned_bundle(tuned, bundle):
    folder, report = tuned.folder, tuned.report
    assert [p.name for p in folder.parent.iterdir()] == ["b"]
    before, after = Bundle.open(bundle), Bundle.open(folder)
    after.verify()
    assert after.manifest.files.keys() - before.manifest.files.keys() == {"timings.json"}
    assert json.loads((folder / "report.json").read_text())["tuning"] == json.loads(json.dumps(report))
    timings, trees = json.loads((folder / "timings.json").read_text()), report["trees"]
    one, two = (timings["times"][batch] for batch in "12")
    assert [n for n, _ in one["verify"]] == [1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 33, 48, 64]
    assert [n for n, _ in two["draft"]] == [1, 2, 3, 5, 8, 9, 17, 33, 64]
    assert [tree["tree"] for tree in trees] == [f"best:{n}" for n in (1, 2, 4, 8, 16, 32)]
    accepted = [tree["accepted"] for tree in trees]
    assert accepted == sorted(accepted)
    assert 0.3 < accepted[0] < 1 < accepted[-1]
    best = max(trees, key=lambda tree: tree["speedup"])
    assert all(report[name] == best[name] for name in ("tree", "speedup"))
    assert best["nodes"] <= TreeSpec.parse(timings["widest"]).nodes
    assert report["auto"] > 0
    assert 0 <= report["greedy"]["calibration_error"] < 0.2


@pytest.mark.slow
def test_when_the_time_is_up_a_few_prompts_are_run_all_the_same(tuned):
    """Of `auto` and plain decoding, each is first in its turn."""
    assert tuned.report["prompts"] == 2
    assert [told for told in tuned.progress if told[0] in ("texts", AUTO)] == [
        (what, number, 6) for what in ("texts", AUTO) for number in (0, 1)
    ]
    assert [name for _, name in tuned.order[-4:]] == [OFF, AUTO, AUTO, OFF]


@pytest.mark.slow
def test_what_fails_leaves_the_bundle_as_it_was(tuned, monkeypatch):
    folder = tuned.folder
    before = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    monkeypatch.setattr(tuning, "file_record", lambda path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tune(folder, Tuning(new_tokens=8, batch_sizes=[1], count=1))
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()} == before
    assert sorted(p.name for p in folder.parent.iterdir()) == ["b"]
