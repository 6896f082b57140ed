"""What a device's steps take is told to live timings, and no token depends on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from device_requests import run
from odd_clocks import bewitch
from tuned_device import LARGE, Tuned, plain

from specbuild.runtime.backends.kernels.abi import KernelLibrary
from specbuild.runtime.decoding.device.step_clock import StepClock
from specbuild.runtime.speculation.live import LiveTimings
from specbuild.runtime.speculation.policy import Policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def told(made: Tuned, lanes: int) -> LiveTimings:
    live = LiveTimings(made.policy.timings, lanes)
    made.policy = Policy(made.policy.timings, made.policy.drafts, live=live)
    made.loop.live, made.loop.clock = live, StepClock(live, made.loop.target, made.loop.draft_executor)
    return live


@pytest.mark.parametrize("ahead", [0, 32])
def test_rounds_by_themselves_are_told(host: KernelLibrary, folder: Path, ahead: int) -> None:
    """The stand-in is far faster than the table says."""
    made = Tuned(host, folder, LARGE, ("target", "target"), ahead=ahead, batch_size=2)
    live = told(made, 2)
    done = run(made.loop, made.requests(3))
    assert [s.output for s in done] == plain(folder, done)
    assert live.said > live.took > 0
    assert live.correction < 0.5
    assert made.loop.stats.correction == live.took / live.said


@pytest.mark.slow(only=("0-2", "32-3"))
@pytest.mark.parametrize(("ahead", "seed"), [(0, 1), (0, 2), (32, 3)])
def test_tokens_are_the_same_by_any_clock(host: KernelLibrary, folder: Path, ahead: int, seed: int) -> None:
    made = Tuned(host, folder, LARGE, ("target", "draft"), ahead=ahead, batch_size=2, drafter=None)
    told(made, 2)
    executors: list[Any] = [made.loop.target, made.loop.draft_executor]
    for number, executor in enumerate(executors):
        bewitch(executor, seed + number)
    done = run(made.loop, made.requests(3, temperature=0.9 * (seed % 2)))
    assert [s.output for s in done] == plain(folder, done)


def test_plain_rounds_that_follow_each_other_cost_the_loop_nothing(host: KernelLibrary, folder: Path) -> None:
    """Their steps are the table's, and what exceeds them is the loop's own: here nothing does."""
    plains = list[float]()
    for ahead in (0, 32):
        made = Tuned(host, folder, LARGE | {"plain": 1e-4}, ("target",), ahead=ahead, batch_size=2)
        live = told(made, 2)
        run(made.loop, made.requests(2))
        assert (made.device.turns > 0) is (ahead > 0)
        plains.append(live.at(2).plain)
    assert plains[1] < plains[0] / 3
