"""The habits that a bundle brings: what mostly follows, and that an engine drafts it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from specbuild.builder import habits
from specbuild.builder.habits import mostly
from specbuild.runtime import Bundle, Engine
from specbuild.runtime.drafting.factory import habits_of


def texts(*each: list[int]) -> list[np.ndarray]:
    return [np.array(tokens, np.int64) for tokens in each]


def test_what_mostly_follows() -> None:
    several = texts([1, 2, 3, 1, 2, 3, 1, 2, 4], [7], [])
    assert sorted(mostly(several, 1).tolist()) == [[1, 2], [2, 3], [3, 1]]
    assert sorted(mostly(several, 2).tolist()) == [[1, 2, 3], [2, 3, 1], [3, 1, 2]]
    assert mostly(texts([1, 2, 3]), 1).tolist() == []
    assert mostly([], 2).shape == (0, 3)


def test_a_bundle_brings_what_the_library_says(bundle: Path) -> None:
    record = json.loads((bundle / habits.FILE).read_text())
    assert len(record["before"]) == len(record["last"]) == len(record["next"]) > 1000
    brought = habits_of(Bundle.open(bundle))
    with Engine.load(bundle) as engine:
        *text, follows = engine.tokenizer.encode("    def __init__(self")
    assert brought.guess(text, None, -1) == follows
    assert brought.guess(text, "salted", -1) == follows
