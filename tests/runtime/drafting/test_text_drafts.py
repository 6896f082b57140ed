"""What texts offer as drafts: decided for all sequences together, measured, and learnt from."""

from __future__ import annotations

from typing import Any

import pytest
from made_up_chances import CHANCES

from specbuild.runtime.drafting.text_drafts import TextDrafts
from specbuild.runtime.sampling.sampler import SamplingParams
from specbuild.runtime.speculation.live import LiveTimings
from specbuild.runtime.speculation.policy import Policy
from specbuild.runtime.speculation.rest import PEEKS, Rest, Waits
from specbuild.runtime.speculation.timings import TimingTable

TIMES = {"verify": [[1, 10.0], [64, 6400.0]], "draft": [[1, 0.2], [64, 2.0]], "plain": 0.4, "round": 0.4, "level": 0.04}
REPEATING, FRESH = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7], [6, 7, 8, 9]


def policy(lanes: int, free: int = 0) -> Policy:
    """Where a row costs as much as a step."""
    record = {"schema": 2, "machine": {}, "widest": "best:16", "times": {str(lanes): TIMES}}
    table = TimingTable.of(record | {"chances": {"greedy": CHANCES, "sampled": CHANCES}}, 64)
    return Policy(table, drafts=False, free=free, live=LiveTimings(table, lanes))


def asked(request_of: Any, made: Policy, *texts: list[int]) -> list[Any]:
    params = SamplingParams(speculation="best:8", max_new_tokens=40)
    requests = [request_of(text, params, slot=slot) for slot, text in enumerate(texts)]
    for each in requests:
        each.policy, each.cached = made.for_request(0.0), len(each.tokens) - 1
    return requests


@pytest.mark.parametrize("padded", [False, True])
def test_rows_of_a_padded_step_are_there_for_all(request_of: Any, padded: bool) -> None:
    """Where the step is a row longer for one, it is for the others as well; else every row is paid for."""
    made = policy(4, free=8 if padded else 0)
    requests = asked(request_of, made, REPEATING, REPEATING, FRESH, FRESH)
    trees = TextDrafts(padded=padded).trees(requests, None)
    assert [tree.tokens[:2] if len(tree) > 1 else None for tree in trees if tree] == (
        [[7, 8], [7, 8], None, None] if padded else [None] * 4
    )


def test_deciding_is_measured_and_the_models_debt_is_told(request_of: Any) -> None:
    requests = asked(request_of, policy(2), REPEATING, FRESH)
    TextDrafts().trees(requests, [3, 1])
    assert [each.policy.owed for each in requests] == [len(REPEATING) - 1 - 3, len(FRESH) - 1 - 1]
    assert requests[0].policy.rest.took == requests[1].policy.rest.took > 0


def test_a_row_to_spare_is_filled_from_habits(request_of: Any) -> None:
    """Without lookup nothing is."""
    for looks_up in (True, False):
        texts = TextDrafts(looks_up, padded=True)
        texts.learn(request_of([5, 8, 9, 4], SamplingParams(speculation="off")), 3)
        (tree,) = texts.trees(asked(request_of, policy(4, free=8), FRESH), None)
        assert tree
        assert tree.tokens == ([9, 4] if looks_up else [9])


def test_a_decided_round_learns_what_rounds_without_decisions_emitted_before(request_of: Any) -> None:
    whole, apart = TextDrafts(), TextDrafts()
    [one] = asked(request_of, policy(2), [1, 2, 3, 4, 5, 6, 7])
    whole.learn(one, 4)
    one.policy.rest.dozed = 3
    apart.learn(one, 1)
    assert one.policy.rest.dozed == 0
    for count in range(4, 7):
        known = [each.habits.guess(one.tokens[:count], None, one.policy.guess) for each in (whole, apart)]
        assert known[0] == known[1] == one.tokens[count]


def test_another_one_has_learnt_nothing(request_of: Any) -> None:
    texts = TextDrafts()
    texts.learn(request_of(FRESH, SamplingParams(speculation="off")), 4)
    assert texts.habits.after(FRESH[:2], None) == FRESH[2]
    again = texts.again(looks_up=False)
    assert (again.habits.after(FRESH[:2], None), again.looks_up) == (None, False)


@pytest.mark.parametrize(
    ("text", "learnt", "wakes"),
    [
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], True),
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7], False),
        ([*range(1, 9), 0, *range(1, 9)], [], True),
        ([*range(1, 9), 0, *range(2, 9)], [], False),
    ],
)
def test_a_look_wakes_what_could_have_been_drafted(
    request_of: Any, text: list[int], learnt: list[int], wakes: bool
) -> None:
    """It wakes a sequence whose last four tokens habits foretold, or that repeats its last eight."""
    texts, rest = TextDrafts(), Rest(Waits(), left=8 * PEEKS[0])
    texts.habits.learn(learnt, len(learnt), None)
    for _ in range(PEEKS[0]):
        assert rest.dozes()
    texts.reflect(request_of(text, SamplingParams(speculation="best:4")), rest)
    assert rest.rests is not wakes
    assert not rest.due
    assert texts.habits.after(text[-3:-1], None) == text[-1], "it is learnt"
