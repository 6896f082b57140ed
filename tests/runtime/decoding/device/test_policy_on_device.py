"""`auto`, limits and a tuned table on a device: plain decoding's tokens, and the decisions that the table implies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_requests import Made, request_of, run
from tuned_device import LARGE, SMALL, Tuned, plain

from specbuild.runtime import Limits
from specbuild.runtime.backends.kernels.abi import KernelLibrary


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.nightly(but=("draft-0.9-large-32", "draft-0.0-small-0", "target-0.9-small-32", "target-0.0-large-0"))
@pytest.mark.parametrize("ahead", [0, 32])
@pytest.mark.parametrize("times", [LARGE, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("draft", ["target", "draft"])
def test_tokens_are_plain_decodings(
    host: KernelLibrary, folder: Path, times: dict[str, Any], ahead: int, temperature: float, draft: str
) -> None:
    made = Tuned(host, folder, times, ("target", draft), ahead=ahead, batch_size=2, drafter=None)
    done = run(made.loop, made.requests(3, temperature=temperature))
    assert [s.output for s in done] == plain(folder, done)
    for s in done:
        told = s.metrics.speculative_decoding
        assert sum(told.decisions.values()) > 0
        assert set(told.decisions) <= {"plain", "lookup", "model", "probe"}


@pytest.mark.parametrize("ahead", [0, 32])
def test_a_draft_that_pays_is_used_and_its_steps_are_full(host: KernelLibrary, folder: Path, ahead: int) -> None:
    """The draft is the target: every round drafts with it, as many nodes as the step has that is paid for."""
    made = Tuned(host, folder, LARGE, ("target", "target"), ahead=ahead)
    (done,) = run(made.loop, made.requests(tokens=60))
    told = done.metrics.speculative_decoding
    assert told.decisions["model"] >= sum(told.decisions.values()) - 3
    assert told.mean_acceptance_length > 2
    drafted = told.num_draft_tokens / told.num_spec_steps
    assert drafted > 2
    assert made.loop.stats.rounds < 40


@pytest.mark.parametrize("ahead", [0, 32])
@pytest.mark.parametrize("times", [LARGE, SMALL], ids=["large", "small"])
def test_a_bad_draft_is_left(host: KernelLibrary, folder: Path, ahead: int, times: dict[str, Any]) -> None:
    """As on the host: after a few rounds it is tried now and then, a token at a time."""
    made = Tuned(host, folder, times, ("target", "target"), ahead=ahead, hostile=True)
    texts = [run(made.loop, made.requests(tokens=60))[0] for _ in range(2)]
    assert [s.output for s in texts] == plain(folder, texts)
    told = texts[-1].metrics.speculative_decoding
    assert told.decisions.get("model", 0) <= 2
    assert told.decisions["plain"] > 40
    assert told.num_draft_tokens <= 8 * told.decisions.get("model", 0) + told.decisions.get("probe", 0)


@pytest.mark.nightly(only=("32",))
@pytest.mark.parametrize("ahead", [0, 32])
def test_limits_hold(host: KernelLibrary, folder: Path, ahead: int) -> None:
    """For `auto` and for trees that were asked for, whatever the table says."""
    for limits, most in ((Limits(max_draft_tokens=3), 3), (Limits(max_draft_tokens=0), 0)):
        made = Tuned(host, folder, LARGE, ("target", "target"), limits, ahead)
        auto, fixed = (*made.requests(), *made.requests())
        fixed.policy = None
        done = run(made.loop, [auto, fixed])
        assert [s.output for s in done] == plain(folder, done)
        for s in done:
            told = s.metrics.speculative_decoding
            assert told.num_draft_tokens <= most * told.num_spec_steps
            assert bool(told.num_spec_steps) == bool(most)
    made = Tuned(host, folder, LARGE, ("target", "target"), Limits(min_expected_speedup=50), ahead)
    (done,) = run(made.loop, made.requests())
    assert done.metrics.speculative_decoding.num_draft_tokens == 0
    by_size = Limits(num_speculative_tokens_per_batch_size={"1-1": 7, "2-9": 0})
    made = Tuned(host, folder, LARGE, ("target", "target"), by_size, ahead, batch_size=2)
    long, short = made.requests(2, tokens=40)
    short.limit = len(short.tokens) + 12
    run(made.loop, [long, short])
    assert short.metrics.speculative_decoding.num_draft_tokens == 0, "two drafted beside each other"
    assert long.metrics.speculative_decoding.num_draft_tokens > 0, "and one alone at the end"


def test_what_ends_while_others_are_launched_keeps_its_rows(host: KernelLibrary, folder: Path) -> None:
    """Its slot is released after the others' rounds began, which must neither write there nor end by that."""
    by_size = Limits(num_speculative_tokens_per_batch_size={"1-1": 7, "2-9": 0})
    made = Tuned(host, folder, LARGE, ("target", "target"), by_size, 32, batch_size=2)
    long, short = made.requests(2, tokens=40)
    short.limit = len(short.tokens) + 12
    run(made.loop, [long, short])
    again = request_of(short.tokens, speculation="off", max_new_tokens=9)
    run(made.loop, [again])
    assert again.metrics.num_cached_tokens == len(short.tokens) - 1
    assert [again.output] == plain(folder, [again])
    cache = made.device.array(made.target.model.cache)[:, again.slot, :, : again.cached]
    alone = Made(host, folder, 1, ("target",))
    alone.loop.logits(again.tokens[: again.cached])
    np.testing.assert_allclose(cache, alone.device.array(alone.target.model.cache)[:, 0, :, : again.cached], atol=1e-4)


@pytest.mark.parametrize("ahead", [0, 32])
def test_a_second_text_is_drafted_from_what_the_first_taught(host: KernelLibrary, folder: Path, ahead: int) -> None:
    """Habits are learnt of every round, also of those under way, and kept apart by salt."""
    made = Tuned(host, folder, LARGE, ("target",), ahead=ahead, drafter=None)
    told = []
    for salt in (None, None, "another"):
        done = run(made.loop, made.requests(tokens=40, cache_salt=salt, temperature=0.9))
        assert [s.output for s in done] == plain(folder, done)
        told.append(done[0].metrics.speculative_decoding)
    assert told[1].decisions["habit"] > told[0].decisions.get("habit", 0) == told[2].decisions.get("habit", 0)
    assert told[1].num_accepted_draft_tokens > 20 > told[2].num_accepted_draft_tokens
