"""Rounds that follow each other on a device: the tokens are plain decoding's, however far ahead the device is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_requests import Made, Words, prompt_of, request_of, requests, run
from host_device import HostDevice, HostQueue, QueuedModel
from tiny_models import CHUNK, TEXT, VOCAB, executor

from specbuild.runtime.backends.gpu.device import Step
from specbuild.runtime.backends.kernels.abi import KernelLibrary
from specbuild.runtime.decoding.device.rounds import Draft
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


@pytest.mark.soak(only=("best:7-32-0", "best:7-32-1", "best:7-3-0", "best:7-2-9", "chain:3-32-1", "chain:3-3-2"))
@pytest.mark.slow(but=("chain:3-2-9", "chain:3-32-0"))
@pytest.mark.parametrize(("rounds", "ahead"), [(32, 0), (32, 1), (32, 40), (3, 0), (3, 2), (2, 9)])
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


def test_every_request_among_others(host: KernelLibrary, folder: Path, plain: Any) -> None:
    """Those with and without speculation, who decode together round by round, and on the device where they can."""
    made = Resident(host, folder)
    assert [s.output for s in run(made.loop, requests("topk:2,3"))] == plain(requests("off"))
    assert made.device.turns > 5


@pytest.mark.slow
def test_statistics_are_the_device_loops(host: KernelLibrary, folder: Path) -> None:
    mine = run(Resident(host, folder, 3).loop, batch("topk:2,3", 3, max_new_tokens=24))
    theirs = run(Made(host, folder, 3).loop, batch("topk:2,3", 3, max_new_tokens=24))
    for one, other in zip(mine, theirs, strict=True):
        assert one.output == other.output
        assert one.metrics.speculative_decoding == other.metrics.speculative_decoding


@pytest.mark.parametrize("names", [("target",), ("target", "draft")], ids=["alone", "with a draft"])
def test_without_speculation(host: KernelLibrary, folder: Path, plain: Any, names: tuple[str, ...]) -> None:
    made = Resident(host, folder, 2, names)
    done = run(made.loop, batch("off", 2, max_new_tokens=16))
    assert [s.output for s in done] == plain(batch("off", 2, max_new_tokens=16))
    assert made.device.turns == made.loop.stats.rounds - 2 == 14  # all but the prompts' and the first of its kind


def flights(made: Resident, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rounds each launch from now on may do."""
    launch, done = made.flights.launch, list[int]()

    def noted(plan: list[Draft], *bounds: Any) -> None:
        launch(plan, *bounds)
        if made.flights._flight:
            done.append(made.flights.ahead - made.flights._flight.read)

    monkeypatch.setattr(made.flights, "launch", noted)
    return done


@pytest.mark.parametrize(("rounds", "expected"), [(32, [22]), (9, [9, 9, 4]), (21, [21])])
def test_one_launch_does_many_rounds(
    host: KernelLibrary, folder: Path, monkeypatch: pytest.MonkeyPatch, rounds: int, expected: list[int]
) -> None:
    """As many as the ring holds and are surely wanted: of 24 tokens all but the prompt's and the first round's."""
    made = Resident(host, folder, 1, ("target",), rounds=rounds, ahead=99)
    done = flights(made, monkeypatch)
    run(made.loop, batch("off", 1, max_new_tokens=24))
    assert done == expected
    assert made.device.turns == sum(expected)  # of 21 rounds the last token is a round by itself


def test_no_launch_goes_past_a_cache(
    host: KernelLibrary, folder: Path, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft that is always right fills it fastest; for the second tree there is no room from the beginning."""

    def wanted(tree: str) -> list[Sequence]:
        return [request_of(prompt_of(i, TEXT - 22), speculation=tree, max_new_tokens=22 - 9 * i) for i in range(2)]

    reference = plain(wanted("off"))
    for tree, expected in (("topk:5,3", 5), ("best:7", 11)):
        made = Resident(host, folder, 2, ("target", "target"), ahead=99)
        done = flights(made, monkeypatch)
        assert [s.output for s in run(made.loop, wanted(tree))] == reference
        assert done[0] == expected


@pytest.mark.slow(but=("0",))
@pytest.mark.parametrize("ahead", [0, 3, 99])
def test_ends_in_the_middle(host: KernelLibrary, folder: Path, plain: Any, ahead: int) -> None:
    """An end-of-sequence token or a stop string is seen late: what follows is dropped, and the others go on."""
    (full,) = plain(batch("off", 1, max_new_tokens=20))
    others = plain(batch("off", 3, max_new_tokens=20))[1:]
    for at in (2, 5, 9):
        stop = Words().decode(full[at - 1 : at + 1])
        made, wanted = Resident(host, folder, ahead=ahead), batch("chain:3", 3, max_new_tokens=20)
        wanted[0] = batch("chain:3", 1, max_new_tokens=20, stop=stop)[0]
        done = run(made.loop, wanted)
        assert (done[0].output, done[0].finish_reason) == (full[: at + 1], "stop")
        assert [s.output for s in done[1:]] == others


@pytest.mark.slow(only=("99",))
@pytest.mark.parametrize("ahead", [0, 99])
def test_leaving_and_joining(host: KernelLibrary, folder: Path, plain: Any, ahead: int) -> None:
    """One is cancelled in mid-flight, and another takes its slot: it gets no token any more."""
    made, wanted = Resident(host, folder, ahead=ahead), batch("topk:2,3", 3, max_new_tokens=20)
    expected = plain(batch("off", 3, max_new_tokens=20))
    leaver, stayer, joiner = wanted
    leaver.slot, stayer.slot = 0, 1
    for _ in range(5):
        made.loop.round([leaver, stayer])
    assert made.flights.under_way
    tokens = list(leaver.output)
    made.loop.release(0)
    joiner.slot = 0
    active = [stayer, joiner]
    while active:
        made.loop.round(active)
        for sequence in [s for s in active if s.finish_reason]:
            made.loop.release(sequence.slot)
            active.remove(sequence)
    assert leaver.output == tokens == expected[0][: len(tokens)]
    assert [stayer.output, joiner.output] == expected[1:]
    text = prompt_of(1, 40)
    np.testing.assert_allclose(made.loop.logits(text), Made(host, folder).loop.logits(text), rtol=1e-4, atol=1e-4)
    made.loop.close()


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


@pytest.mark.parametrize("ahead", [0, 99])
def test_a_fault_ends_its_sequence_alone(
    host: KernelLibrary, folder: Path, plain: Any, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    """A shape that its graph has no room for, as if memory had been overwritten."""
    made, wanted = Resident(host, folder, ahead=ahead), batch("chain:3", 3, max_new_tokens=20)
    expected, body = plain(batch("off", 3, max_new_tokens=20)), made.flights._body

    def spoilt(*arguments: Any) -> None:
        growth = made.device.array(made.loop.rounds.slots.at["growths"])[0].view(np.int32)

        def spoil() -> None:
            if len(wanted[0].output) > 3 or made.device.turns > 3:
                growth[0] = 99 if wanted[0].slot == 0 and not wanted[0].finish_reason else growth[0]

        made.device.run(made.target.stream, spoil)
        body(*arguments)

    monkeypatch.setattr(made.flights, "_body", spoilt)
    run(made.loop, wanted)
    assert "fault CAPACITY" in str(wanted[0].error)
    assert 0 < len(wanted[0].output) < 20
    assert wanted[0].output == expected[0][: len(wanted[0].output)]
    assert [s.output for s in wanted[1:]] == expected[1:]


@pytest.mark.parametrize("names", [("target",), ("target", "draft")], ids=["alone", "with a draft"])
def test_what_is_no_logit_ends_its_sequence_alone(
    host: KernelLibrary, folder: Path, plain: Any, names: tuple[str, ...]
) -> None:
    made, steps = Resident(host, folder, 2, names, ahead=9), [0]
    tree = "chain:3" if len(names) == 2 else "off"

    def spoil(nodes: int) -> None:
        steps[0] += 1
        if steps[0] == 5:
            made.device.array(made.target.model.logits).ravel()[nodes * VOCAB : 2 * nodes * VOCAB] = np.nan
            for each in made.loop._executors:  # the slot's next sequence must find none of it
                made.device.array(each.model.cache)[:, 1] = np.nan

    made.target.model.spoil = spoil  # type: ignore[attr-defined]
    first, second, third = run(made.loop, batch(tree, 3, max_new_tokens=20))
    expected = plain(batch("off", 3, max_new_tokens=20))
    assert "no token's score is finite" in str(second.error)
    assert second.output == expected[1][: len(second.output)]
    assert [first.output, third.output] == [expected[0], expected[2]]


def test_a_step_that_fails_leaves_the_loop_usable(host: KernelLibrary, folder: Path, plain: Any) -> None:
    made, wanted = Resident(host, folder), batch("chain:3", 2, max_new_tokens=20)
    for slot, sequence in enumerate(wanted):
        sequence.slot = slot
    for _ in range(4):
        made.loop.round(wanted)

    def fail(nodes: int) -> None:
        raise ExecutionError("out of luck")

    made.target.model.spoil = fail  # type: ignore[attr-defined]
    with pytest.raises(ExecutionError, match="out of luck"):
        made.loop.round(wanted)
    made.target.model.spoil = None  # type: ignore[attr-defined]
    for slot in range(2):
        made.loop.release(slot)
    done = run(made.loop, batch("chain:3", 3, max_new_tokens=20))
    assert [s.output for s in done] == plain(batch("off", 3, max_new_tokens=20))


def test_without_such_graphs_it_is_the_device_loop(
    host: KernelLibrary, folder: Path, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, asked = Resident(host, folder), list[int]()

    def refuse(body: Any, stream: int) -> Step | None:
        asked.append(stream)
        made.device.uncaptured.append("no such graphs")
        return None

    monkeypatch.setattr(made.device, "loop", refuse)
    done = run(made.loop, batch("chain:3", 3))
    assert [s.output for s in done] == plain(batch("off", 3))
    assert len(asked) == len(made.device.uncaptured) == 1, "it is tried once"


def test_without_models_that_graphs_can_hold(
    host: KernelLibrary, folder: Path, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(QueuedModel, "capturable", False)
    made = Resident(host, folder)
    done = run(made.loop, batch("chain:3", 3))
    assert [s.output for s in done] == plain(batch("off", 3))
    assert made.device.captured == 0
    assert made.loop.notes == ["the models' steps may not be captured, by their own word"]


def test_without_the_kernel_that_publishes(
    host: KernelLibrary, folder: Path, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = HostQueue.launch

    def lacking(self: HostQueue, name: str, *more: Any) -> None:
        if name == "publish":
            raise ExecutionError("no kernel publish")
        launch(self, name, *more)

    monkeypatch.setattr(HostQueue, "launch", lacking)
    made = Resident(host, folder)
    assert made.loop.notes == ["no kernel publish"]
    done = run(made.loop, batch("chain:3", 3))
    assert [s.output for s in done] == plain(batch("off", 3))


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
    assert not made.flights._loops
    assert not any(made.device._streams.values())


def test_the_device_stops_when_nobody_is_left(host: KernelLibrary, folder: Path) -> None:
    made = Resident(host, folder)
    wanted = in_flight(made)
    made.loop.release(0)  # as one that was cancelled: it has no reason yet
    wanted[0].finish_reason = "cancelled"
    assert made.flights.under_way, "the other goes on"
    made.loop.release(1)
    assert not made.flights.under_way
    assert not made.device._streams[made.target.stream]
