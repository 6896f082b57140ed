"""Rounds that follow each other on a device: the tokens are plain decoding's, however far ahead the device is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_requests import Made, prompt_of, request_of, run
from host_device import HostDevice, HostQueue, QueuedModel
from tiny_models import CHUNK, TEXT, executor

from specbuild.runtime.backends.kernels.abi import KernelLibrary
from specbuild.runtime.decoding.host_loop import HostLoop
from specbuild.runtime.errors import ExecutionError, OptionError
from specbuild.runtime.requests.sequence import Sequence


class Resident(Made):
    """A loop with what it is made of; `ahead`: turns that the device takes before the host looks at the first."""

    def __init__(
        self,
        host: KernelLibrary,
        folder: Path,
        batch_size: int = 2,
        names: tuple[str, ...] = ("target", "draft"),
        drafter: Any = "model",
        rounds: int = 32,
        ahead: int = 0,
    ) -> None:
        super().__init__(host, folder, batch_size, names, drafter, rounds=rounds)
        self.device.ahead = ahead
        assert self.loop.flights
        self.flights = self.loop.flights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Callable[[list[Sequence]], list[list[int]]]:
    """The same requests decoded one by one by the loop on the host: their tokens."""

    def decode(wanted: list[Sequence]) -> list[list[int]]:
        target = executor("target", HostDevice(), folder, 1)
        return [s.output for s in run(HostLoop(target, None, CHUNK, frozenset()), wanted)]

    return decode


def batch(tree: str, count: int = 2, **fields: Any) -> list[Sequence]:
    """Requests of different lengths, greedy and sampled ones with penalties."""
    sampled = {"temperature": 0.9, "frequency_penalty": 0.6, "repetition_penalty": 1.2, "top_p": 0.95}
    return [
        request_of(prompt_of(i, 5 + 7 * i), speculation=tree, seed=i, **({} if i % 2 == 0 else sampled) | fields)
        for i in range(count)
    ]


@pytest.mark.soak(only=("best:7-32-0", "best:7-3-0", "best:7-2-9", "chain:3-3-2"))
@pytest.mark.nightly(but=("chain:3-2-9", "chain:3-32-0"))
@pytest.mark.parametrize(("rounds", "ahead"), [(32, 0), (32, 40), (3, 0), (3, 2), (2, 9)])
@pytest.mark.parametrize("tree", ["chain:3", "best:7"])
def test_tokens_are_plain_decodings(
    host: KernelLibrary, folder: Path, plain: Any, tree: str, rounds: int, ahead: int
) -> None:
    """Prompts join and leave; with a ring shorter than their texts, and a device that is lazy or far ahead."""
    made = Resident(host, folder, rounds=rounds, ahead=ahead)
    done = run(made.loop, batch(tree, 4, max_new_tokens=21))
    assert [s.output for s in done] == plain(batch("off", 4, max_new_tokens=21))
    assert {s.finish_reason for s in done} == {"length"}
    assert made.device.turns > 10
    assert all(s.metrics.speculative_decoding.num_accepted_draft_tokens for s in done)


def test_what_needs_the_host_is_done_round_by_round(host: KernelLibrary, folder: Path, plain: Any) -> None:
    """Log-probabilities; and the text's own continuation, for which the device is stopped."""
    made = Resident(host, folder)
    done = run(made.loop, batch("chain:3", 2, logprobs=2))
    assert [s.output for s in done] == plain(batch("off", 2))
    assert all(len(s.logprobs) == len(s.output) for s in done)
    assert not made.device.turns
    loop_of = [17, 4, 29, 61, 8, 2, 55, 90, 31]
    more = {"logit_bias": dict.fromkeys(loop_of, 30.0), "max_new_tokens": 30}
    made = Resident(host, folder, 1, drafter=None)
    (one,) = run(made.loop, [request_of(prompt_of(2, 6), speculation="chain:3", **more)])
    assert [one.output] == plain([request_of(prompt_of(2, 6), speculation="off", **more)])
    assert 0 < made.device.turns < made.loop.stats.rounds - 1


@pytest.mark.parametrize(("rounds", "ahead"), [(0, 0), (32, 0), (32, 99)])
def test_a_fault_ends_its_sequence_alone(
    host: KernelLibrary, folder: Path, plain: Any, rounds: int, ahead: int
) -> None:
    """A shape that its graph has no room for, as if memory had been overwritten."""
    made, wanted = Made(host, folder, rounds=rounds), batch("chain:3", 3, max_new_tokens=20)
    made.device.ahead, steps, growths = ahead, [0], made.device.array(made.loop.rounds.slots.at["growths"])

    def spoil(nodes: int) -> None:
        steps[0] += 1
        if steps[0] > 5 and wanted[0].slot == 0 and not wanted[0].finish_reason:
            growths[0].view(np.int32)[0] = 99

    made.target.model.spoil = spoil  # type: ignore[attr-defined]
    run(made.loop, wanted)
    expected = plain(batch("off", 3, max_new_tokens=20))
    assert "fault CAPACITY" in str(wanted[0].error)
    assert 0 < len(wanted[0].output) < 20
    assert wanted[0].output == expected[0][: len(wanted[0].output)]
    assert [s.output for s in wanted[1:]] == expected[1:]


@pytest.mark.parametrize("names", [("target", "target"), ("target",)], ids=["a perfect draft", "alone"])
def test_one_launch_does_many_rounds_and_none_past_a_text(
    host: KernelLibrary, folder: Path, plain: Any, names: tuple[str, ...]
) -> None:
    """However far ahead the device is, near the cache's end too: all rounds but the prompts' and the first are its."""

    def wanted(tree: str) -> list[Sequence]:
        return [request_of(prompt_of(i, TEXT - 22), speculation=tree, max_new_tokens=22 - 9 * i) for i in range(2)]

    for tree in ("off", "chain:3"):
        made = Resident(host, folder, 2, names, ahead=99)
        assert [s.output for s in run(made.loop, wanted(tree))] == plain(wanted("off"))
        assert made.device.turns > 4
        made = Resident(host, folder, 1, names, ahead=99)
        (done,) = run(made.loop, [request_of(prompt_of(3, 6), speculation=tree, max_new_tokens=23)])
        assert done.finish_reason == "length"
        if tree == "off" or len(names) > 1:
            assert made.device.turns == made.loop.stats.rounds - 2


@pytest.mark.parametrize("lack", ["loops", "capture", "publish"])
def test_without_what_it_needs_it_is_the_device_loop(
    host: KernelLibrary, folder: Path, plain: Any, monkeypatch: pytest.MonkeyPatch, lack: str
) -> None:
    """Graphs of loops, models that graphs can hold, or the kernel that publishes; a note says so, where it is known."""
    launch = HostQueue.launch

    def lacking(self: HostQueue, name: str, *more: Any) -> None:
        if name == "publish":
            raise ExecutionError("no kernel publish")
        launch(self, name, *more)

    if lack == "loops":
        monkeypatch.setattr(HostDevice, "loop", lambda *_: None)
    elif lack == "capture":
        monkeypatch.setattr(QueuedModel, "capturable", False)
    else:
        monkeypatch.setattr(HostQueue, "launch", lacking)
    made = Resident(host, folder)
    assert [s.output for s in run(made.loop, batch("chain:3", 3))] == plain(batch("off", 3))
    assert made.device.turns == 0
    assert bool(made.loop.notes) is (lack != "loops")


def test_a_host_that_reads_out_of_order(host: KernelLibrary, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(OptionError, match="needs an x86_64 host, this is aarch64"):
        Resident(host, folder)


def in_flight(made: Resident) -> list[Sequence]:
    """Two sequences that the device decodes by itself by now."""
    wanted = batch("chain:3", 2, max_new_tokens=40)
    for slot, sequence in enumerate(wanted):
        sequence.slot = slot
    while not made.flights.under_way:
        made.loop.round(wanted)
    return wanted


@pytest.mark.parametrize("ahead", [0, 2])
def test_it_is_closed_in_the_middle_of_rounds(host: KernelLibrary, folder: Path, ahead: int) -> None:
    made = Resident(host, folder, ahead=ahead)
    in_flight(made)
    made.loop.close()
    assert made.device.turns < 32


def test_the_device_stops_when_nobody_is_left(host: KernelLibrary, folder: Path) -> None:
    made = Resident(host, folder)
    wanted = in_flight(made)
    made.loop.release(0)  # as one that was cancelled: it has no reason yet
    wanted[0].finish_reason = "cancelled"
    assert made.flights.under_way, "the other goes on"
    made.loop.release(1)
    assert not made.flights.under_way
