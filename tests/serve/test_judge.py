"""The judge without a server: draws, the order of evidence, and what a promotion or rollback does to later draws."""

from __future__ import annotations

from typing import Any

import pytest
from serving import Log

from specbuild.serve.arms import CanaryOptions
from specbuild.serve.judge import Judge


def judge(**more: Any) -> Judge:
    options = CanaryOptions(candidate="speculation=off", weight=50, max_weight=50, **more)
    return Judge("m", options, False, Log(), lambda: 0.0)  # type: ignore[arg-type]


def test_a_key_keeps_its_arm_and_is_fresh_once() -> None:
    own = judge()
    for key in "abcdef":
        arms = [own.draw(key) for _ in range(3)]
        assert len({candidate for candidate, _ in arms}) == 1
        assert [draw.fresh for _, draw in arms if draw] == [True, False, False]
    assert sum(own.requests) == 18


@pytest.mark.parametrize(("phase", "candidate"), [("promoted", True), ("rolled back", False)])
def test_after_the_verdict_nothing_is_drawn(phase: Any, candidate: bool) -> None:
    own = judge()
    own.turn(phase)
    assert own.draw("a") == (candidate, None)


def test_what_ends_early_waits_for_what_came_before() -> None:
    own = judge()
    draws = [draw for _, draw in (own.draw(None) for _ in range(3)) if draw]
    own.note(draws[2], {"ttft": 3.0})
    own.note(draws[1], {})  # no evidence
    assert own._ready.empty()
    own.note(draws[0], {"ttft": 1.0})
    assert [own._ready.get_nowait()[0].number for _ in range(own._ready.qsize())] == [0, 2]
    own.note(draws[0], {"ttft": 9.0})
    assert own._ready.empty(), "it has counted already"
