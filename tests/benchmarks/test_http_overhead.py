"""The benchmark of the server: a crowd's figures, and ratios within a turn."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def http_overhead(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module("http_overhead")


def test_a_crowd_takes_every_prompt_once(http_overhead: Any) -> None:
    taken = []

    async def stream(prompt: str) -> AsyncIterator[int]:
        taken.append(prompt)
        for _ in range(3):
            await asyncio.sleep(0)
            yield 2

    found = asyncio.run(http_overhead.crowd(stream, ["a", "b", "c"], 2))
    assert sorted(taken) == ["a", "b", "c"]
    assert found["tokens_per_second"] > 0
    assert found["median_gap"] > 0


def test_ratios_are_of_turns(http_overhead: Any) -> None:
    engine = [{"tokens_per_second": speed, "median_gap": 1.0} for speed in (10, 20, 40)]
    server = [{"tokens_per_second": speed, "median_gap": 1.5} for speed in (9, 20, 20)]
    assert http_overhead.ratios({"server": server, "engine": engine}) == {"tokens_per_second": 0.9, "median_gap": 1.5}
