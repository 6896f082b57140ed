"""`auto`, limits and a tuned table on a device: plain decoding's tokens, and the decisions that the table implies."""

from __future__ import annotations

from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from device_requests import Made, prompt_of, request_of, run
from tiny_models import BUCKETS
from tuned_device import LARGE, SMALL, Tuned, plain, policy_of

from specbuild.runtime import Limits
from specbuild.runtime.backends.kernels.abi import KernelLibrary
from specbuild.runtime.drafting import text_drafts
from specbuild.runtime.drafting.text_drafts import TextDrafts
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.live import LiveTimings
from specbuild.runtime.speculation.policy import Policy
from specbuild.runtime.speculation.rest import RESTS, WATCH
from specbuild.runtime.speculation.tree import TreeSpec


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.slow(but=("draft-0.9-large-32", "draft-0.0-small-0", "target-0.9-small-32", "target-0.0-large-0"))
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


@pytest.mark.slow(only=("32",))
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


@pytest.mark.parametrize("ahead", [0, 32])
def test_limits_that_change_between_rounds_change_no_token(host: KernelLibrary, folder: Path, ahead: int) -> None:
    """Also while rounds follow each other: what was begun before ends, and no round after it drafts more."""
    made = Tuned(host, folder, LARGE, ("target", "target"), None, ahead)
    auto, fixed = (*made.requests(tokens=24), *made.requests(tokens=24))
    fixed.policy, turn, seen = None, 0, list[tuple[int, int]]()
    round_of = made.loop.round

    def changing(sequences: list[Sequence]) -> None:
        nonlocal turn
        most, told = (7, 7, 7, 0, 0, 0, 2, 2, 2)[turn % 9], fixed.metrics.speculative_decoding
        made.loop.planner.limit(Limits(most))
        before, turn = told.num_draft_tokens, turn + 1
        round_of(sequences)
        seen.append((most, told.num_draft_tokens - before))

    made.loop.round = changing  # type: ignore[method-assign]
    done = run(made.loop, [auto, fixed])
    assert [s.output for s in done] == plain(folder, done)
    late = [(most, drafted) for (before, _), (most, drafted) in pairwise(seen) if before == most]
    assert all(drafted <= most for most, drafted in late)
    assert {most for most, drafted in late if drafted} == {7, 2}


def test_a_larger_tree_than_is_allowed_is_refused(host: KernelLibrary, folder: Path) -> None:
    made = Tuned(host, folder, LARGE, limits=Limits(max_draft_tokens=3))
    with pytest.raises(Exception, match="max_draft_tokens allows 3"):
        made.loop.check(request_of(prompt_of(1, 4), speculation="chain:5"))


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 32])
def test_the_text_s_own_continuation_competes(host: KernelLibrary, folder: Path, ahead: int) -> None:
    """In a loop of the text it is drafted for nothing, also in mid-flight."""
    loop_of = [17, 4, 29, 61, 8, 2, 55, 90, 31]
    made = Tuned(host, folder, LARGE, ("target", "windowed"), ahead=ahead, drafter=None)
    (done,) = run(made.loop, made.requests(tokens=70, logit_bias=dict.fromkeys(loop_of, 30.0)))
    assert [done.output] == plain(folder, [done])
    told = done.metrics.speculative_decoding
    assert told.decisions.get("lookup", 0) > 0
    assert told.num_accepted_draft_tokens > 0


def test_rounds_still_follow_each_other(host: KernelLibrary, folder: Path) -> None:
    """Decisions that hardly differ do not stop the device: few launches for many rounds."""
    made = Tuned(host, folder, LARGE, ("target", "target"), ahead=32)
    assert made.loop.flights
    launches, launch = list[Any](), made.loop.flights.launch

    def noted(plan: Any, *bounds: Any) -> None:
        launch(plan, *bounds)
        launches.append([draft.spec for draft in plan])

    made.loop.flights.launch = noted  # type: ignore[method-assign]
    (done,) = run(made.loop, made.requests(tokens=80))
    assert made.device.turns > 0
    assert len(launches) <= made.loop.stats.rounds / 2
    assert done.error is None


def test_what_is_expected_of_a_tree_is_what_comes_true(host: KernelLibrary, folder: Path) -> None:
    """A device tells how deep a path went and nothing of likelihoods: trust rises with a perfect draft, and falls."""
    good = Tuned(host, folder, LARGE, ("target", "target"))
    run(good.loop, good.requests(tokens=60))
    bad = Tuned(host, folder, LARGE, ("target", "target"), hostile=True)
    run(bad.loop, bad.requests(tokens=60))
    trusts = [made.policy.for_request(0.0).model.ratio for made in (good, bad)]
    assert trusts[0] > 0.9 > 0.5 > trusts[1]
    assert np.isfinite(trusts).all()


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


def test_what_is_promised_is_what_runs() -> None:
    """A size that was good before is not kept where the limits have become smaller since."""
    policy = policy_of(LARGE).for_request(0.0)
    shape = TreeSpec.parse("best:15")
    policy.model.accepted = 3 * policy.model.expected
    policy.choose(1, 0, 40)
    large = policy.grown(shape, BUCKETS)
    assert large.depth > 2
    policy.choose(1, 0, 40)
    small = policy.grown(shape.within(1) or shape, BUCKETS)
    assert (small.depth, small.nodes, policy.now.levels, len(policy.below)) == (1, 1, 1, 2)
    policy.choose(1, 0, 40)
    assert policy.grown(shape, BUCKETS) == large


@pytest.mark.parametrize("tokens", [30, 40])
def test_a_limit_that_grows_with_the_batch_holds_in_mid_flight(host: KernelLibrary, folder: Path, tokens: int) -> None:
    """One that is alone with its last token beside it may draft nothing any more, and nothing is drafted for it."""
    limits = Limits(num_speculative_tokens_per_batch_size={"1-1": 0, "2-4": 7})
    made = Tuned(host, folder, LARGE, ("target", "target"), limits, 32, batch_size=2)
    first, second = made.requests(2, tokens=tokens)
    for each in (first, second):
        each.policy = None
    first.limit -= tokens - 14
    drafted = list[int]()
    round_of = made.loop.round

    def watched(sequences: list[Sequence]) -> None:
        told = second.metrics.speculative_decoding
        before, alone = told.num_draft_tokens, len([s for s in sequences if s.drafts]) < 2 and bool(second.output)
        round_of(sequences)
        if alone:
            drafted.append(told.num_draft_tokens - before)

    made.loop.round = watched  # type: ignore[method-assign]
    done = run(made.loop, [first, second])
    for s, output in zip(done, plain(folder, done), strict=True):
        assert s.output == output[: len(s.output)]
    assert first.metrics.speculative_decoding.num_draft_tokens > 0
    assert set(drafted[1:]) == {0}, "but for the round that was under way"


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


@pytest.mark.parametrize("ahead", [0, 32])
def test_where_deciding_takes_longer_than_drafts_bring_it_is_left(
    host: KernelLibrary, folder: Path, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock on which a decision takes a twentieth of a step; all rest, and begin to decide again."""
    clock = count(0.0, 0.5)
    monkeypatch.setattr(text_drafts, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    made, decided = Tuned(host, folder, LARGE, ("target",), ahead=ahead, batch_size=2, drafter=None), list[int]()
    trees = TextDrafts.trees
    monkeypatch.setattr(TextDrafts, "trees", lambda *given: decided.append(len(given[1])) or trees(*given))
    done = run(made.loop, made.requests(2, tokens=80))
    assert [s.output for s in done] == plain(folder, done)
    assert WATCH <= sum(map(bool, decided)) <= 80 - RESTS[0]
    assert made.policy.sessions.of(None, False).shared.waits.rounds > RESTS[0]


def test_sequences_are_decided_together(host: KernelLibrary, folder: Path) -> None:
    """Their trees have one depth, whatever each has seen of its own."""
    dear = SMALL | {"draft": [[1, 0.3], [16, 0.35]], "verify": [[1, 1.0], [16, 1.0]]}
    levels = list[list[int]]()
    made = Tuned(host, folder, dear, ("target", "target"), batch_size=3)
    live = LiveTimings(made.policy.timings, 3)
    made.policy, rounds = Policy(made.policy.timings, drafts=True, live=live), made.loop.rounds
    draft = rounds.draft

    def noted(plan: Any, *more: Any) -> None:
        levels.append([each.spec.depth for each in plan if each.spec])
        draft(plan, *more)

    rounds.draft = noted  # type: ignore[method-assign]
    done = run(made.loop, made.requests(3, tokens=30))
    assert [s.output for s in done] == plain(folder, done)
    assert {len(set(each)) for each in levels} <= {0, 1}
    assert max(map(len, levels)) > 1
