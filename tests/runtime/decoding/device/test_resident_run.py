"""Rounds that follow each other on a device: the tokens are plain decoding's, however far ahead the device is."""

import numpy as np
import pytest
from device_requests import Made, check_plain, plain, prompt_of, request_of, run
from host_device import HostDevice, HostQueue, QueuedModel
from tiny_models import TEXT

from specbuild.runtime.errors import ExecutionError, OptionError

BOTH = ("target", "draft")


def resident(host, folder, batch_size=2, names=BOTH, rounds=32, ahead=0, looks_up=False):
    """`ahead`: turns that the device takes before the host looks at the first."""
    made = Made(host, folder, batch_size, names, looks_up, rounds=rounds)
    made.device.ahead = ahead
    return made


def batch(tree, count=2, **fields):
    """Requests of different lengths, greedy and sampled ones with penalties."""
    sampled = {"temperature": 0.9, "frequency_penalty": 0.6, "repetition_penalty": 1.2, "top_p": 0.95}
    return [
        request_of(prompt_of(i, 5 + 7 * i), speculation=tree, seed=i, **({} if i % 2 == 0 else sampled) | fields)
        for i in range(count)
    ]


@pytest.mark.soak(only=("best:7-3-0",))
@pytest.mark.nightly(but=("chain:3-2-9", "chain:3-32-40"))
@pytest.mark.slow
@pytest.mark.parametrize(("rounds", "ahead"), [(32, 40), (3, 0), (3, 2), (2, 9)])
@pytest.mark.parametrize("tree", ["chain:3", "best:7"])
def test_tokens_are_plain_decodings(host, folder, tree, rounds, ahead):
    """Prompts join and leave; with a ring shorter than their texts, and a device that is lazy or far ahead."""
    made = resident(host, folder, rounds=rounds, ahead=ahead)
    done = run(made.loop, batch(tree, 4, max_new_tokens=21))
    check_plain(folder, done)
    assert {s.finish_reason for s in done} == {"length"}
    assert made.device.turns > 10
    assert all(s.metrics.speculative_decoding.num_accepted_draft_tokens for s in done)


@pytest.mark.slow
def test_what_needs_the_host_is_done_round_by_round(host, folder):
    """Log-probabilities; and the text's own continuation, for which the device is stopped."""
    made = resident(host, folder)
    done = run(made.loop, batch("chain:3", 2, logprobs=2))
    check_plain(folder, done)
    assert all(len(s.logprobs) == len(s.output) for s in done)
    assert not made.device.turns
    biased = {"logit_bias": dict.fromkeys([17, 4, 29, 61, 8, 2, 55, 90, 31], 30.0), "max_new_tokens": 30}
    made = resident(host, folder, 1, looks_up=True)
    check_plain(folder, run(made.loop, [request_of(prompt_of(2, 6), speculation="chain:3", **biased)]))
    assert 0 < made.device.turns < made.loop.stats.rounds - 1


@pytest.mark.slow(but=("32-99",))
@pytest.mark.parametrize(("rounds", "ahead"), [(0, 0), (32, 0), (32, 99)])
def test_a_fault_ends_its_sequence_alone(host, folder, rounds, ahead):
    """A shape that its graph has no room for, as if memory had been overwritten."""
    made, wanted = resident(host, folder, rounds=rounds, ahead=ahead), batch("chain:3", 3, max_new_tokens=20)
    steps, growths = [0], made.device.array(made.loop.rounds.slots.at["growths"])

    def spoil(nodes):
        steps[0] += 1
        if steps[0] > 5 and wanted[0].slot == 0 and not wanted[0].finish_reason:
            growths[0].view(np.int32)[0] = 99

    made.target.model.spoil = spoil
    first, *others = run(made.loop, wanted)
    assert "fault CAPACITY" in str(first.error)
    assert 0 < len(first.output) < 20
    assert first.output == plain(folder, [first])[0].output[: len(first.output)]
    check_plain(folder, others)


@pytest.mark.slow(but=("chain:3-a perfect draft",))
@pytest.mark.parametrize("names", [("target", "target"), ("target",)], ids=["a perfect draft", "alone"])
@pytest.mark.parametrize("tree", ["off", "chain:3"])
def test_one_launch_does_many_rounds_and_none_past_a_text(host, folder, names, tree):
    """However far ahead the device is, near the cache's end too: all rounds but the prompts' and the first are its."""
    made = resident(host, folder, 2, names, ahead=99)
    lengths = (22, 13)
    wanted = [request_of(prompt_of(i, TEXT - 22), speculation=tree, max_new_tokens=n) for i, n in enumerate(lengths)]
    check_plain(folder, run(made.loop, wanted))
    assert made.device.turns > 4
    made = resident(host, folder, 1, names, ahead=99)
    run(made.loop, [request_of(prompt_of(3, 6), speculation=tree, max_new_tokens=23)])
    if tree == "off" or len(names) > 1:
        assert made.device.turns == made.loop.stats.rounds - 2


@pytest.mark.parametrize("lack", ["loops", "capture", "publish"])
def test_without_what_it_needs_it_is_the_device_loop(host, folder, monkeypatch, lack):
    """Graphs of loops, models that graphs can hold, or the kernel that publishes; a note says so, where it is known."""
    launch = HostQueue.launch

    def lacking(self, name, *more):
        if name == "publish":
            raise ExecutionError("no kernel publish")
        launch(self, name, *more)

    if lack == "loops":
        monkeypatch.setattr(HostDevice, "loop", lambda *_: None)
    elif lack == "capture":
        monkeypatch.setattr(QueuedModel, "capturable", False)
    else:
        monkeypatch.setattr(HostQueue, "launch", lacking)
    made = resident(host, folder)
    check_plain(folder, run(made.loop, batch("chain:3", 1)))
    assert made.device.turns == 0
    assert bool(made.loop.notes) is (lack != "loops")


def test_a_host_that_reads_out_of_order(host, folder, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(OptionError, match="needs an x86_64 host, this is aarch64"):
        resident(host, folder)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 2])
def test_the_device_stops_when_nobody_is_left(host, folder, ahead):
    """Two leave one after the other, or the loop is closed in the middle of rounds."""
    for closed in (False, True):
        made, wanted = resident(host, folder, ahead=ahead), batch("chain:3", 2, max_new_tokens=40)
        own = made.loop.resident
        for slot, sequence in enumerate(wanted):
            sequence.slot = slot
        while not own.running:
            made.loop.round(wanted)
        if closed:
            made.loop.close()
            assert made.device.turns < 32
            continue
        made.loop.release(0)  # as one that was cancelled: it has no reason yet
        wanted[0].end("cancelled")
        assert own.running, "the other goes on"
        made.loop.release(1)
        assert not own.running


def test_a_device_that_ends_early_is_reported(host, folder):
    made = resident(host, folder, 1)
    made.device.reached = lambda *_: False
    with pytest.raises(ExecutionError, match=r"the loop on the device ended before round .*: report it"):
        run(made.loop, batch("chain:3", 1))
