"""A bundle can be tuned that has room for its texts; tests/measure/tuning/test_tune.py has what is measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from specbuild.measure.tuning.measure import untunable
from specbuild.runtime import Bundle


def test_bundles_of_short_texts_are_refused(bundle: Path) -> None:
    manifest = Bundle.open(bundle).manifest
    assert untunable(replace(manifest, max_seq_len=32)) is None
    assert untunable(replace(manifest, max_seq_len=31)) == (
        "has texts of 31 tokens at most: too short to tune it by them"
    )
