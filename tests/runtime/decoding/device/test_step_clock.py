"""What a device's steps take is told to live timings, and no token depends on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from device_requests import check_plain, run
from odd_clocks import bewitch
from tuned_device import LARGE, Tuned

from specbuild.runtime.backends.kernels.abi import KernelLibrary
from specbuild.runtime.decoding.device.step_clock import StepClock
from specbuild.runtime.speculation.live import LiveTimings
from specbuild.runtime.speculation.policy import Policy


def told(made: Tuned, lanes: int) -> LiveTimings:
    live = LiveTimings(made.policy.timings, lanes)
    made.policy = Policy(made.policy.timings, made.policy.drafts, live=live)
    made.loop.live, made.loop.clock = live, StepClock(live, made.loop.target, made.loop.draft_executor)
    return live


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 32])
def test_rounds_by_themselves_are_told(host: KernelLibrary, folder: Path, ahead: int) -> None:
    """The stand-in is far faster than the table says."""
    made = Tuned(host, folder, LARGE, ("target", "target"), ahead=ahead, batch_size=2)
    live = told(made, 2)
    done = run(made.loop, made.requests(3))
    check_plain(folder, done)
    assert live.said > live.took > 0
    assert live.correction < 0.5
    assert made.loop.stats.correction == live.took / live.said


@pytest.mark.slow
def test_each_model_has_the_seconds_of_its_own_steps(host: KernelLibrary, folder: Path) -> None:
    """The target's take 10 by the device's clock, the draft's 1, and what it does between them 100."""
    made = Tuned(host, folder, LARGE, ("target", "target"), batch_size=1)
    live, now = told(made, 1), [0.0]
    models: list[Any] = [made.loop.target.model, made.loop.draft_executor.model]  # type: ignore[union-attr]
    counted = [len(model.steps) for model in models]
    made.device.clock = lambda: now[0]

    def passes(seconds: float) -> None:
        now[0] += seconds

    for model, seconds in zip(models, (10.0, 1.0), strict=True):
        model.spoil = lambda nodes, seconds=seconds: passes(seconds)
    upload = made.device.upload

    def between(to: Any, source: Any, stream: int) -> None:
        made.device.run(stream, lambda: passes(100.0))
        upload(to, source, stream)

    made.device.upload = between  # type: ignore[method-assign]
    done = run(made.loop, made.requests(2))
    ran = [len(model.steps) - count for model, count in zip(models, counted, strict=True)]
    assert min(ran) > 5
    assert made.loop.target.seconds == 10 * ran[0]
    assert made.loop.draft_executor.seconds == ran[1]  # type: ignore[union-attr]
    assert made.loop.stats.verify == 10 * ran[0]
    assert live.correction == pytest.approx(1, rel=0.3), "as the table has it"
    check_plain(folder, done)


@pytest.mark.nightly(only=("0-2", "32-3"))
@pytest.mark.slow
@pytest.mark.parametrize(("ahead", "seed"), [(0, 1), (0, 2), (32, 3)])
def test_tokens_are_the_same_by_any_clock(host: KernelLibrary, folder: Path, ahead: int, seed: int) -> None:
    made = Tuned(host, folder, LARGE, ("target", "draft"), ahead=ahead, batch_size=2, drafter=None)
    told(made, 2)
    executors: list[Any] = [made.loop.target, made.loop.draft_executor]
    for number, executor in enumerate(executors):
        bewitch(executor, seed + number)
    done = run(made.loop, made.requests(3, temperature=0.9 * (seed % 2)))
    check_plain(folder, done)
