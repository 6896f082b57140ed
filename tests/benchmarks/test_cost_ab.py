"""What the benchmark says of a ledger beside the clock."""

from __future__ import annotations

from types import ModuleType

import pytest
from ledgers import machine, request

from specbuild.measure.cost.rows import Rows


def test_the_ledgers_saving_is_held_against_the_clocks(benchmark: ModuleType) -> None:
    """The rows of plain decoding say nothing of what was saved, and those of warming up have other tokens."""
    own = [request(n, output_tokens=64, busy_seconds=10.0, plain_seconds=20.0) for n in range(4)]
    plain = [request(n, output_tokens=64, busy_seconds=25.0, plain_seconds=25.0, speculation="off") for n in range(4)]
    warm = request(9, output_tokens=16, busy_seconds=1.0, plain_seconds=900.0)
    rows = Rows([*own, *plain, warm], [machine(price_per_hour=3600.0, busy_seconds={"m": 141.0})])
    found = benchmark.summary(rows, [{"auto": 10.0, "off": 20.0 + n} for n in range(4)], 64)
    assert found["seconds"] == {"auto": 40.0, "off": 86.0}
    assert found["saved_by_the_ledger"]["value"] == pytest.approx(40.0)
    clock = found["saved_by_the_clock"]
    assert 40 <= clock["low"] < clock["value"] == 46.0 < clock["high"] <= 52
    assert found["ledger_over_clock"] == pytest.approx(40 / 46)
    assert found["plain_seconds_estimated_over_busy_ones_measured"] == pytest.approx(0.8)
    assert found["requests_busy_over_the_machines"] == 1.0
