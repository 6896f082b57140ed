"""The cost of exactness: the old specbuild's copy of a bundle, and ratios within a turn."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import exactness_cost
from specbuild.runtime import Bundle


def test_the_copy_has_no_classes_and_the_bundle_keeps_them(bundle: Path, tmp_path: Path) -> None:
    before = (bundle / "manifest.json").read_bytes()
    copied = exactness_cost.without_classes(bundle, tmp_path)
    assert "exactness" not in json.loads((copied / "manifest.json").read_text())
    assert not Bundle.open(copied).manifest.exactness
    assert (bundle / "manifest.json").read_bytes() == before


def test_ratios_are_of_the_same_prompt() -> None:
    def took(*seconds: float) -> dict[exactness_cost.Who, exactness_cost.Took]:
        who = [("old", "off"), ("old", "auto"), ("new", "off"), ("new", "auto")]
        return {name: exactness_cost.Took(60, each, rounds=40) for name, each in zip(who, seconds, strict=True)}

    found = exactness_cost.ratios([took(1, 2, 2, 1), took(10, 20, 20, 10), took(4, 8, 8, 4)])
    assert found["off, new/old"] == [0.5, 0.5, 0.5]  # each prompt took twice as long, however long it takes
    assert found["auto, new/old"] == [2, 2, 2]
    assert found["old off tokens_per_second"] == 15
    assert found["new auto tokens_per_round"] == 1.5
    mean, low, high = exactness_cost.ratios([took(1, 1, 1, 1), took(1, 1, 2, 1)])["off, new/old"]
    assert low < mean < high
