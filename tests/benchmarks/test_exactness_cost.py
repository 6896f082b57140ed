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


def test_ratios_are_medians_of_turns() -> None:
    def of(*speeds: float) -> list[exactness_cost.Found]:
        return [{kind: {"tokens_per_second": s, "tokens_per_round": 1.0} for kind in ("warm-up", "a")} for s in speeds]

    results = {("old", "off"): of(10, 20, 40), ("new", "off"): of(9, 18, 20), ("old", "auto"): of(20, 20, 20)}
    results["new", "auto"] = of(30, 30, 30)
    found = exactness_cost.ratios(results)
    assert set(found) == {"a"}
    assert found["a"]["off, new/old"] == 0.9
    assert found["a"]["auto, new/old"] == 1.5
    assert found["a"]["new auto/old off"] == 1.5
    assert found["a"]["old off tokens_per_second"] == 20
