"""Rounds that follow each other with the texts' continuations, which the device drafts by itself."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from device_requests import check_plain, plain, request_of, run
from host_device import HostQueue
from tiny_models import TEXT
from tuned_device import LARGE, Tuned

from specbuild.runtime import Limits
from specbuild.runtime.backends.exactness import ExactnessClass
from specbuild.runtime.backends.kernels.abi import KernelLibrary
from specbuild.runtime.errors import ExecutionError
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.depth import Depths

NODES = 16
LOOP = dict.fromkeys([17, 4, 29, 61, 8, 2, 55, 90, 31], 30.0)  # a bias towards few tokens: the text repeats itself


class Fixed(Depths):
    """Always the same bound, whatever rounds take."""

    def choose(self, sequences: int, most: int) -> tuple[int, int | None]:
        return min(24, most), None


class Odd(Depths):
    """Any bound, in any number of rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = itertools.count()

    def choose(self, sequences: int, most: int) -> tuple[int, int | None]:
        return ((4, 3), (0, 5), (most, 8), (most, None))[next(self.calls) % 4]


class Continuing(Tuned):
    """A tuned loop in a class of steps, so that every step has rows to spare."""

    def __init__(
        self,
        host: KernelLibrary,
        folder: Path,
        batch_size: int = 2,
        names: tuple[str, ...] = ("target",),
        ahead: int = 0,
        drafter: Any = None,
        limits: Limits | None = None,
        depths: type[Depths] = Fixed,
    ) -> None:
        exactness = ExactnessClass(batch_size * NODES, NODES)
        super().__init__(host, folder, LARGE, names, limits, 32, batch_size, drafter, exactness=exactness)
        self.device.ahead = ahead
        self.loop.proposals = replace(self.loop.proposals, depths=(depths(), depths()))

    def requests(self, count: int = 2, tokens: int = 60, **fields: Any) -> list[Sequence]:
        return super().requests(count, tokens, **{"logit_bias": LOOP} | fields)


def drafted(sequence: Sequence) -> int:
    return sequence.metrics.speculative_decoding.num_draft_tokens


@pytest.mark.soak(only=("alone-40-Fixed", "with a draft-40-Odd", "with a draft-1-Odd", "alone-2-Depths"))
@pytest.mark.nightly(but=("alone-0-Fixed", "with a draft-2-Depths"))
@pytest.mark.slow(but=("alone-0-Fixed",))
@pytest.mark.parametrize(("ahead", "depths"), [(0, Fixed), (1, Odd), (40, Fixed), (40, Odd), (2, Depths)])
@pytest.mark.parametrize("names", [("target",), ("target", "draft")], ids=["alone", "with a draft"])
def test_tokens_are_plain_decodings(
    host: KernelLibrary, folder: Path, names: tuple[str, ...], ahead: int, depths: type[Depths]
) -> None:
    """Prompts join and leave, greedy and sampled with penalties; the device drafts in rounds that nobody planned."""
    made = Continuing(host, folder, names=names, ahead=ahead, depths=depths)
    wanted = [*made.requests(2, 40), *made.requests(1, 24, temperature=0.9, top_p=0.95, frequency_penalty=0.1)]
    done = run(made.loop, wanted)
    check_plain(folder, done)
    assert made.device.turns > 10
    assert made.loop.stats.rounds < made.loop.stats.emitted
    for told in (s.metrics.speculative_decoding for s in done[:2]):
        assert told.num_accepted_draft_tokens > (10 if depths is Fixed else 0)
        assert told.num_accepted_draft_tokens <= told.num_draft_tokens
        assert told.decisions.get("lookup")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "drafter", "most"),
    [
        (Limits(num_speculative_tokens_per_batch_size=[[1, 4, 2]]), None, 2),
        (Limits(min_expected_speedup=50), None, 0),
        (None, "model", 0),
    ],
)
def test_limits_hold(host: KernelLibrary, folder: Path, limits: Limits | None, drafter: Any, most: int) -> None:
    made = Continuing(host, folder, 1, drafter=drafter, limits=limits)
    done = run(made.loop, made.requests(1))
    check_plain(folder, done)
    told = done[0].metrics.speculative_decoding
    assert told.num_draft_tokens <= most * told.num_spec_steps
    assert bool(told.num_spec_steps) is bool(most)


@pytest.mark.nightly(only=("40",))
@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 40])
def test_one_ends_or_leaves_in_the_middle(host: KernelLibrary, folder: Path, ahead: int) -> None:
    """An end of a text within what was drafted, and a request that is cancelled; what follows is dropped."""
    made = Continuing(host, folder, 3, ahead=ahead)
    full = [s.output for s in plain(folder, made.requests(3))]
    at = max(full[0].index(token) for token in full[0])  # the token that occurs for the first time last
    wanted = made.requests(3)
    wanted[0] = made.requests(1, stop_token_ids=(full[0][at],))[0]
    for slot, sequence in enumerate(wanted):
        sequence.slot = slot
    active = list(wanted)
    while active:
        made.loop.round(active)
        if len(wanted[1].output) > 15 and wanted[1] in active:  # the scheduler cancels it
            wanted[1].finish_reason = "cancelled"
        for sequence in [s for s in active if s.finish_reason]:
            made.loop.release(sequence.slot)
            active.remove(sequence)
    assert (wanted[0].output, wanted[0].finish_reason) == (full[0][: at + 1], "stop")
    assert wanted[1].output == full[1][: len(wanted[1].output)]
    assert wanted[2].output == full[2]


@pytest.mark.slow
def test_no_launch_goes_past_a_cache(host: KernelLibrary, folder: Path) -> None:
    made = Continuing(host, folder, 1, ahead=99)
    prompt = [*LOOP] * 9
    wanted = request_of(prompt[: TEXT - 50], speculation="best:15", max_new_tokens=50, logit_bias=LOOP)
    wanted.policy = made.policy.for_request(0.0)
    (done,) = run(made.loop, [wanted])
    assert done.finish_reason == "length"
    check_plain(folder, [done])


@pytest.mark.slow
def test_without_the_kernel_the_host_continues_texts(
    host: KernelLibrary, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a bundle that was built before there was one."""
    launch = HostQueue.launch

    def lacking(self: HostQueue, name: str, *more: Any) -> None:
        if name == "continue_text":
            raise ExecutionError("no kernel continue_text")
        launch(self, name, *more)

    monkeypatch.setattr(HostQueue, "launch", lacking)
    made = Continuing(host, folder)
    assert made.loop.notes == ["no kernel continue_text"]
    done = run(made.loop, made.requests(2))
    check_plain(folder, done)
    assert all(drafted(s) for s in done)


@pytest.mark.slow(but=("salts0-True",))
@pytest.mark.parametrize(("salts", "known"), [(("one", "one"), True), (("one", "other"), False)])
def test_what_one_text_said_the_next_one_drafts(
    host: KernelLibrary, folder: Path, salts: tuple[str | None, str | None], known: bool
) -> None:
    """A request that is asked again, of a text that does not repeat itself; not what was said under another salt."""
    made, accepted = Continuing(host, folder, 1), list[int]()
    for salt in salts:
        (done,) = run(made.loop, made.requests(1, 24, logit_bias={}, cache_salt=salt))
        check_plain(folder, [done])
        accepted.append(done.metrics.speculative_decoding.num_accepted_draft_tokens)
    assert (accepted[1] > accepted[0] + 5) is known
