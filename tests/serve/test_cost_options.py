"""What is wrong with prices, ledgers and labels is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specbuild.runtime.errors import OptionError
from specbuild.serve.cost_options import MAX_OWNER, CostOptions

FILE = {"ledger": Path("l.jsonl")}


@pytest.mark.parametrize(
    "given",
    [
        {"price_per_hour": -1.0},
        {"price_per_hour": float("nan")},
        {"price_per_hour": float("inf")},
        {"currency": "usd"},
        {"currency": "EURO"},
        {"ledger_rotate": "day"},
        {"owner": ("a=b",)},
        FILE | {"ledger_rotate": "weekly"},
        FILE | {"ledger_rotate": "0MB"},
        FILE | {"owner": ("team",)},
        FILE | {"owner": ("=b",)},
        FILE | {"owner": ("a=",)},
        FILE | {"owner": ("a=b", "a=c")},
        FILE | {"owner": ("a=" + "b" * 257,)},
        FILE | {"owner": tuple(f"a{n}=b" for n in range(MAX_OWNER + 1))},
    ],
)
def test_what_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        CostOptions(**given)


def test_what_is_taken() -> None:
    found = CostOptions(**FILE, price_per_hour=7.2, ledger_rotate="100MB", owner=("team=a=b", "x=y"))
    assert (found.per_second, found.max_bytes, found.labels) == (0.002, 100_000_000, {"team": "a=b", "x": "y"})
    assert (CostOptions().per_second, CostOptions(**FILE, ledger_rotate="day").max_bytes) == (None, None)
