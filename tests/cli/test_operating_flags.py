"""The flags of canary and drift: they become options, and one alone that does nothing is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specbuild.cli.operating_flags import OPTIONS, taken
from specbuild.runtime.errors import OptionError


def given(**values: Any) -> dict[str, Any]:
    return {"port": 1, **{str(option.name): () if option.multiple else None for option in OPTIONS}, **values}


def test_nothing_given_is_nothing_compared_or_watched() -> None:
    values = given()
    assert taken(values) == (None, None)
    assert values == {"port": 1}, "the rest is left"


def test_what_is_given_becomes_options() -> None:
    values = given(
        canary="speculation=auto",
        canary_weight=5.0,
        canary_action="both",
        canary_ignore=("ttft",),
        drift=Path("d"),
        drift_size=600,
    )
    canary, drift = taken(values)
    assert canary is not None
    assert drift is not None
    assert canary.ignore == ("ttft",)
    assert (canary.candidate, canary.weight, canary.action, canary.step_weight) == ("speculation=auto", 5, "both", 10)
    assert (drift.reference, drift.size, drift.sample) == (Path("d"), 600, None)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"canary_max_weight": 5.0}, "--canary-max-weight does nothing without --canary"),
        ({"drift_sample": Path("x")}, "--drift-sample does nothing without --drift"),
    ],
)
def test_what_does_nothing_alone(values: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        taken(given(**values))
