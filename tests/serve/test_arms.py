"""Arms: what is refused of a canary, and who is drawn for which arm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specbuild.runtime.errors import OptionError
from specbuild.serve import arms
from specbuild.serve.arms import CanaryOptions, Draws


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"candidate": "chain:4"}, "speculation=TREE"),
        ({"candidate": "model="}, "model=NAME"),
        ({"baseline": "off"}, "canary_baseline"),
        ({"candidate": "speculation=off", "baseline": "speculation=off"}, "nothing to compare"),
        ({"weight": 0}, "canary_weight"),
        ({"weight": 60}, "canary_max_weight"),
        ({"max_weight": 100}, "below 100"),
        ({"weight": float("nan")}, "canary_weight"),
        ({"step_weight": -1}, "canary_step_weight"),
        ({"interval": 0}, "canary_interval"),
        ({"alpha": 1}, "canary_alpha"),
        ({"margin": 0}, "canary_margin"),
        ({"action": "undo"}, "undo"),
        ({"ignore": ("colour",)}, "canary_ignore"),
        ({"sticky": "user"}, "session, request"),
        ({"state": Path("no/such/folder/state.json")}, "canary_state"),
    ],
)
def test_what_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        CanaryOptions(**{"candidate": "speculation=auto"} | given)


def test_what_each_arm_is_drafted_by() -> None:
    one = CanaryOptions(candidate="speculation=chain:4", baseline="speculation=off")
    assert (one.speculation(True), one.speculation(False), one.model) == ("chain:4", "off", None)
    other = CanaryOptions(candidate="model=b")
    assert (other.speculation(True), other.speculation(False), other.model) == (None, None, "b")
    assert (one.speculates_in_both, other.speculates_in_both) == (False, True)


def test_a_key_keeps_its_arm_and_counts_once() -> None:
    draws = Draws("salt")
    first = [draws.draw(f"key{number}", 0.3) for number in range(2000)]
    again = [draws.draw(f"key{number}", 0.3) for number in range(2000)]
    assert [each.candidate for each in first] == [each.candidate for each in again]
    assert all(each.fresh for each in first)
    assert not any(each.fresh for each in again)
    assert 520 < sum(each.candidate for each in first) < 680
    assert [each.number for each in first + again] == list(range(4000))
    more = [draws.draw(f"key{number}", 0.6) for number in range(2000)]
    assert all(later.candidate for earlier, later in zip(first, more, strict=True) if earlier.candidate)


def test_another_salt_draws_others_and_no_key_each_time_anew() -> None:
    one, other = Draws("a"), Draws("b")
    assert [one.draw(str(n), 0.5).candidate for n in range(64)] != [
        other.draw(str(n), 0.5).candidate for n in range(64)
    ]
    alone = [one.draw(None, 0.5) for _ in range(1000)]
    assert all(each.fresh for each in alone)
    assert 430 < sum(each.candidate for each in alone) < 570


def test_keys_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arms, "KEYS", 2)
    draws = Draws("salt")
    assert [draws.draw(key, 0.5).fresh for key in "abaca"] == [True, True, False, True, False]
    assert draws.draw("b", 0.5).fresh
