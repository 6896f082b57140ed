"""What a target says again and again is drafted where that costs nothing, and no text depends on it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from specbuild.runtime.decoding.host_loop import HostLoop
from specbuild.runtime.drafting.habits import LONGEST, Common, Habits
from specbuild.runtime.drafting.lookup_first import LookupDrafter
from specbuild.runtime.errors import BundleError
from specbuild.runtime.sampling.sampler import SamplingParams
from specbuild.runtime.speculation.draft_limits import Limits
from specbuild.runtime.speculation.policy import Policy
from specbuild.runtime.speculation.timings import TimingTable

DEAR = {"verify": [[1, 1.0], [64, 900.0]], "draft": [[1, 1.0], [64, 9.0]], "plain": 0.1, "round": 0.1, "level": 0.1}
CHEAP = DEAR | {"verify": [[1, 1.0], [64, 4.0]], "plain": 0.01, "round": 0.01}
NEVER = {"likely": [-8.0, 0.0], "chance": [0.0, 0.0], "step": 0.0, "reach": [0, 0.01], "lookup": [0.0, 0.01]}
CHANCES = {"greedy": NEVER, "sampled": NEVER}


def policy(free: int = 1, limits: Limits | None = None) -> Policy:
    """Of a machine where no draft pays."""
    table = {"schema": 2, "machine": {}, "widest": "best:16", "times": {"1": DEAR}, "chances": CHANCES}
    return Policy(TimingTable.of(table, 64), drafts=False, limits=limits or Limits(), free=free)


def test_the_latest_is_what_follows() -> None:
    known = Habits()
    assert known.after([5, 6], None) is None
    known.learn([1, 2, 3, 1, 2, 4], 4, None)
    assert known.after([1, 2], None) == 4
    assert known.after([2, 3], None) == 1
    assert [known.after([token], None) for token in (1, 2, 3, 4)] == [2, 4, 1, None]


def test_a_text_is_recalled_as_far_as_it_is_known() -> None:
    known = Habits()
    known.learn([1, 2, 3, 4, 5], 4, None)
    assert known.recall([9, 1, 2], None) == [3, 4, 5]
    assert known.recall([2, 3], None) == [4, 5]
    assert known.recall([2, 3], "another") == []
    assert known.recall([4, 5], None) == known.recall([1], None) == known.recall([2, 1], None) == []
    known.learn([1, 2, 1, 2, 1], 4, None)
    assert known.recall([1, 2], None) == [1, 2] * (LONGEST // 2)


def test_what_others_say_comes_after_what_the_target_said() -> None:
    record = {"schema": 1, "before": [3, -1, -1], "last": [4, 4, 2], "next": [10, 11, 12]}
    known = Habits(Common.of(record, 13))
    assert [known.guess(text, None, -1) for text in ([3, 4], [9, 4], [4], [1, 2], [9, 9])] == [10, 11, 11, 12, None]
    known.learn([9, 4, 5], 1, None)
    assert [known.guess(text, None, -1) for text in ([9, 4], [8, 4], [3, 4])] == [5, 5, 10]
    assert [known.guess(text, None, 7) for text in ([9, 4], [8, 4], [3, 4])] == [5, 7, 7]
    assert [known.guess(text, "a", -1) for text in ([9, 4], [3, 4])] == [11, 10]


@pytest.mark.parametrize(
    "change",
    [
        {"next": [1, 2]},
        {"next": [1, 2, 13]},
        {"next": [1, 2, -1]},
        {"last": [4, 4, -1]},
        {"before": [3, -1, -2]},
        {"schema": 2},
        {"last": None},
        {"more": 1},
    ],
    ids=str,
)
def test_habits_that_are_none_are_refused(change: dict[str, Any]) -> None:
    record = {"schema": 1, "before": [3, -1, -1], "last": [4, 4, 2], "next": [10, 11, 12]} | change
    with pytest.raises(BundleError, match="build the bundle again"):
        Common.of(record, 13)


def test_salts_are_apart() -> None:
    known = Habits()
    known.learn([1, 2, 3], 3, "a")
    assert (known.after([1, 2], "a"), known.after([1, 2], None), known.after([1, 2], "b")) == (3, None, None)


def test_what_is_new_takes_an_older_one_s_place() -> None:
    known = Habits(slots=1)
    known.learn([1, 2, 3], 1, None)
    known.learn([4, 5, 6], 1, None)
    assert (known.after([1, 2], None), known.after([4, 5], None)) == (None, 6)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_second_text_is_read_out_of_habit(
    hash_model: Any, hash_executor: Any, request_of: Any, temperature: float
) -> None:
    """The first teaches it: the same text in another place."""
    model, tokens, told = hash_model(3), dict[int, list[int]](), []
    for free in (0, 1):
        loop, known = HostLoop(hash_executor(model, 1), LookupDrafter(), 64, frozenset()), policy(free)
        for place in range(2):
            params = SamplingParams(max_new_tokens=24, temperature=temperature, seed=3, speculation="best:16")
            request = request_of([7, 3, 9], params)
            request.policy = known.for_request(temperature)
            while not request.finish_reason:
                loop.round([request])
            loop.release(0)
            assert tokens.setdefault(place, request.output) == request.output
            told.append(request.metrics.speculative_decoding)
    assert [each.decisions.get("habit", 0) for each in told[:2]] == [0, 0]
    assert told[3].decisions["habit"] >= 6
    assert told[3].num_accepted_draft_tokens >= 6
    assert told[3].num_accepted_draft_tokens > told[2].num_accepted_draft_tokens


@pytest.mark.parametrize(
    ("text", "learnt", "drafted"),
    [
        ([8, 4, 9, 3, 4], [[3, 4, 5], [7, 4, 6]], 5),  # two tokens, in any text
        ([8, 4, 9, 3, 4], [[7, 4, 6]], 9),  # one, in this text
        ([8, 2, 9, 3, 4], [[7, 4, 6]], 6),  # one, in any
        ([8, 2, 9, 3, 4], [], None),
    ],
)
def test_what_is_surer_comes_first(
    request_of: Any, text: list[int], learnt: list[list[int]], drafted: int | None
) -> None:
    drafter = LookupDrafter()
    request = request_of(text, SamplingParams(max_new_tokens=24, speculation="best:16"))
    request.policy = policy().for_request(0.0)
    for each in learnt:
        drafter.texts.habits.learn(each, 1, None)
    (tree,) = drafter.propose([request])
    assert tree.tokens == [4] + ([] if drafted is None else [drafted])
    assert request.policy.now.kind == ("plain" if drafted is None else "habit")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("size", [1, 2])
def test_what_a_target_has_said_before_is_drafted_where_rows_are_cheap(
    hash_model: Any, hash_executor: Any, request_of: Any, temperature: float, size: int
) -> None:
    """Without a free row: by its promise, alone and in a batch, and the same text comes of it."""
    times = {str(size): CHEAP}
    table = {"schema": 2, "machine": {}, "widest": "best:16", "times": times, "chances": CHANCES}
    known, tokens, told = Policy(TimingTable.of(table, 64), drafts=False), list[list[int]](), []
    loop = HostLoop(hash_executor(hash_model(3), size), LookupDrafter(), 64, frozenset())
    for place in range(2):
        params = SamplingParams(max_new_tokens=24, temperature=temperature, seed=3, speculation="best:16")
        requests = [request_of([7, 3, 9 + slot], params, slot=slot) for slot in range(size)]
        for request in requests:
            request.policy, request.lead = known.for_request(temperature), math.inf  # nobody has to be spared
        while not all(request.finish_reason for request in requests):
            loop.round([request for request in requests if not request.finish_reason])
        for request in requests:
            loop.release(request.slot)
        tokens.append([token for request in requests for token in request.output])
        told.append([request.metrics.speculative_decoding for request in requests])
        assert tokens[place] == tokens[0]
    for first, second in zip(*told, strict=True):
        assert second.decisions["habit"] >= 2
        assert second.num_accepted_draft_tokens >= 12
        assert second.num_accepted_draft_tokens > first.num_accepted_draft_tokens


@pytest.mark.parametrize(("free", "limits", "looks_up"), [(0, None, True), (1, Limits(0), True), (1, None, False)])
def test_it_is_not_drafted_where_that_is_not_free_or_not_allowed(
    request_of: Any, free: int, limits: Limits | None, looks_up: bool
) -> None:
    drafter = LookupDrafter(looks_up=looks_up)
    request = request_of([1, 2, 3, 4], SamplingParams(max_new_tokens=24, speculation="best:16"))
    request.policy = policy(free, limits).for_request(0.0)
    drafter.commit(request, [0, 1])
    drafter.texts.habits.learn([3, 4, 5], 1, None)
    (tree,) = drafter.propose([request])
    assert tree.tokens == [4]
    assert request.policy.now.kind == "plain"
