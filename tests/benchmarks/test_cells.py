"""What benchmarks that run in cells share: what a pair asks, and how engines are loaded and woken."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from specbuild.runtime import LoadOptions, SamplingParams


def test_both_ways_are_asked_the_same(benchmark: Any) -> None:
    texts = ["a", "b", "c"]
    chosen, params = benchmark.requests(texts, 1, 4, 0.8)
    assert chosen == ["b", "c", "a", "b"]
    assert [each.cache_salt for each in params] == ["asked 1 times"] * 2 + ["asked 2 times"] * 2
    assert all(32 <= each.max_new_tokens <= 96 and each.temperature == 0.8 for each in params)
    assert benchmark.requests(texts, 1, 4, 0.8) == (chosen, params)
    assert benchmark.requests(texts, 2, 4, 0.8)[1] != params


class Engine:
    """It notes what it was asked."""

    def __init__(self) -> None:
        self.asked, self.closed = list[tuple[list[str], SamplingParams]](), False

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True

    def generate(self, texts: list[str], params: SamplingParams) -> None:
        self.asked.append((texts, params))


def test_who_is_woken_leaves_nothing_to_draft_from(benchmark: Any) -> None:
    engine = Engine()
    benchmark.awake(engine, ("a",), SamplingParams(90, seed=3, cache_salt="asked 0 times"))
    assert engine.asked == [(["a"], SamplingParams(benchmark.WAKE, seed=3))]


def test_each_load_has_its_share_of_the_pairs(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[Engine]()
    monkeypatch.setattr(benchmark.Engine, "load", lambda *given: made.append(Engine()) or made[-1])
    seen = []
    asked = Namespace(pairs=5, loads=3, one_engine=False)
    for engines, numbers in benchmark.loaded(Path("x"), LoadOptions(), asked):
        seen.append([*numbers])
        assert set(engines) == {"off", "auto"}
        assert [each.closed for each in made[-2:]] == [False, False]
    assert seen == [[0, 1], [2, 3], [4]]
    assert len(made) == 6
    assert all(each.closed for each in made)
    asked.one_engine = True
    assert all(engines["off"] is engines["auto"] for engines, _ in benchmark.loaded(Path("x"), LoadOptions(), asked))
    assert len(made) == 6 + 3


def test_values_of_all_pairs_are_compared_together(benchmark: Any) -> None:
    """A pair with many requests weighs more; the rule of no share is the mean."""
    pairs = [{"off": [1.0, 2.0, 3.0], "auto": [2.0, 2.0, 2.0]}, {"off": [10.0], "auto": [30.0]}]
    assert benchmark.over(pairs) == 36 / 16
    assert benchmark.over(pairs, 0.99) == 3.0
    assert benchmark.over(pairs, 0.5) == 2 / 3


def test_an_interval_is_of_whole_loads(benchmark: Any) -> None:
    """One load twice as fast and one half as fast, however many pairs say so, leave all between them open."""
    assert benchmark.interval([[2.0] * 15, [0.5] * 15]) == pytest.approx([0.5, 2.0])
    assert benchmark.interval([[2.0, 0.5]] * 15) == pytest.approx([1.0, 1.0])


def test_a_cell_of_another_machine_says_so(benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results grow in pieces, perhaps in days and on unlike machines."""
    out, machine = tmp_path / "cells.json", {"cpu": "one"}
    monkeypatch.setattr(benchmark, "machine", lambda: dict(machine))
    for label, cpu in (("a", "one"), ("b", "one"), ("c", "other")):
        machine["cpu"] = cpu
        benchmark.keep(out, benchmark.known(out), label, {"ratio": 1.0})
    assert benchmark.known(out) == {
        "machine": {"cpu": "one"},
        "cells": {"a": {"ratio": 1.0}, "b": {"ratio": 1.0}, "c": {"ratio": 1.0, "machine": {"cpu": "other"}}},
    }
