"""The oracle's benchmark: honest requests are equal, and a flipped bit of the speculative path is found."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def shadow_oracle(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module("shadow_oracle")


@pytest.mark.slow
def test_honest_requests_are_equal_and_a_flipped_weight_is_found_at_once(shadow_oracle: Any, bundle: Path) -> None:
    assert shadow_oracle.silence(bundle, 24)["outcomes"] == {"equal": 24}
    found = shadow_oracle.find(bundle, seed=1)  # an exponent's largest bit
    assert found["bit"] == 6
    assert found["requests"] == shadow_oracle.FEW
    assert found["outcomes"]["different"] >= 1
