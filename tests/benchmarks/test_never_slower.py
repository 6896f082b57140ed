"""What a cell says of its pairs, and that a run goes on where it was stopped."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


class Run:
    """A timed run with one request, whose chunks have these gaps."""

    def __init__(self, *gaps: float) -> None:
        self.seconds, self.tokens, self._gaps = sum(gaps), [8], list(gaps)

    def gaps(self) -> list[float]:
        return self._gaps

    def tpots(self) -> list[float]:
        return [sum(self._gaps) / len(self._gaps)]


def test_a_cell_has_its_mean_its_interval_and_its_tails(benchmark: Any) -> None:
    loads = [
        [{"off": Run(1.0, 1.0), "auto": Run(0.5, 0.5)}],  # twice as fast
        [{"off": Run(1.0, 1.0), "auto": Run(3.0, 1.0)}],  # half as fast
        [{"off": Run(2.0, 2.0), "auto": Run(1.0, 3.0)}],
    ]
    found = benchmark.summary(loads)
    assert found["loads"] == 3
    assert (found["pairs"], found["ratio"], found["ratios"]) == (3, pytest.approx(1.0), [2.0, 0.5, 1.0])
    assert found["plain_tokens_per_s"] == 4.0
    assert found["tpot_p99"] == 1.0  # 2 s a token is the slowest request of both ways
    assert found["longest_gap"] == pytest.approx((0.5 * 3.0 * 1.5) ** (1 / 3))
    assert found["longest_gap_of_all"] == 1.5
    for of, name in (("ratio", "interval"), *((of, f"{of}_interval") for of in ("tpot_p99", "longest_gap"))):
        low, high = found[name]
        assert 0.5 <= low < high < 3.01
        assert low <= found[of] <= high
    assert benchmark.interval([[1.25]] * 30) == pytest.approx([1.25, 1.25])
    assert benchmark.quantile([3.0, 1.0, 2.0], 0.99) == 3.0


def test_a_cell_that_is_there_is_not_run_again_and_a_slow_one_fails(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran, out = list[str](), tmp_path / "out.json"

    def cells(name: str, path: Path, asked: Any, kind: str) -> Iterator[tuple[str, Any]]:
        for label, ratio in (("fast", 1.2), ("slow", 0.9)):
            loads = [[{"off": Run(ratio), "auto": Run(1.0)}]] * asked.pairs
            yield label, lambda at=label, of=loads: ran.append(at) or benchmark.summary(of)

    monkeypatch.setattr(benchmark, "cells", cells)
    monkeypatch.setattr("cells.machine", dict)
    for only, status, run in (("fast", 0, ["fast"]), ("", 1, ["fast", "slow"]), ("", 1, ["fast", "slow"])):
        monkeypatch.setattr(sys, "argv", ["x", "--out", str(out), "--bundle", "a=b", "--pairs", "3", "--only", only])
        assert benchmark.main() == status
        assert ran == run
    assert set(json.loads(out.read_text())["cells"]) == {"fast", "slow"}
    assert "surely below 0.98: ['slow']" in capsys.readouterr().out
