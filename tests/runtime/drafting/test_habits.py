"""What a target says again and again is drafted where that costs nothing, and no text depends on it."""

from __future__ import annotations

from typing import Any

import pytest
from hash_models import HashModel
from hypothesis import given
from hypothesis import strategies as st
from made_up_chances import PricedLoop

from specbuild.runtime import Limits
from specbuild.runtime.drafting.habits import Common, Habits
from specbuild.runtime.errors import BundleError

CHEAP = {"verify": [[1, 1.0], [64, 1.2]], "draft": [[1, 1.0]], "plain": 0.01, "round": 0.01, "level": 0.1}
DEAR = CHEAP | {"verify": [[1, 1.0], [2, 1.0], [3, 50.0], [64, 900.0]]}
RECORD = {"schema": 1, "before": [3, -1, -1], "last": [4, 4, 2], "next": [10, 11, 12]}


def test_salts_are_apart_and_what_is_new_takes_an_older_one_s_place() -> None:
    known = Habits(slots=1)
    known.learn([1, 2, 3], 3, "a")
    assert (known.after([1, 2], "a"), known.after([1, 2], None), known.after([1, 2], "b")) == (3, None, None)
    known.learn([4, 5, 6], 1, "a")
    assert (known.after([1, 2], "a"), known.after([4, 5], "a")) == (None, 6)


def test_a_text_is_recalled_as_far_as_it_is_known() -> None:
    known = Habits()
    known.learn([1, 2, 3, 4, 5], 4, None)
    assert known.recall([9, 1, 2], None) == [3, 4, 5]
    assert known.recall([2, 3], None) == [4, 5]
    assert known.recall([2, 3], "another") == []
    assert known.recall([4, 5], None) == known.recall([1], None) == known.recall([2, 1], None) == []
    known.learn([1, 2, 1, 2, 1], 4, None)
    assert known.recall([1, 2], None) == [1, 2] * 4


def test_what_others_say_comes_after_what_the_target_said() -> None:
    known = Habits(Common.of(RECORD, 13))
    assert [known.guess(text, None, -1) for text in ([3, 4], [9, 4], [4], [1, 2], [9, 9])] == [10, 11, 11, 12, None]
    known.learn([9, 4, 5], 1, None)
    assert [known.guess(text, None, -1) for text in ([9, 4], [8, 4], [3, 4])] == [5, 5, 10]
    assert [known.guess(text, None, 7) for text in ([9, 4], [8, 4], [3, 4])] == [5, 7, 7]
    assert [known.guess(text, "a", -1) for text in ([9, 4], [3, 4])] == [11, 10]


@given(
    st.one_of(
        st.fixed_dictionaries({"next": st.sampled_from([[1, 2], [1, 2, 13], [1, 2, -1], None, 3, ["1", "2", "3"]])}),
        st.fixed_dictionaries({"last": st.sampled_from([[4, 4, -1], [4, 4], None, [4, 4, 1 << 40]])}),
        st.fixed_dictionaries({"before": st.sampled_from([[3, -1, -2], [], "3"])}),
        st.fixed_dictionaries({"schema": st.integers().filter(lambda schema: schema != 1)}),
        st.fixed_dictionaries({"more": st.none()}),
    )
)
def test_habits_that_are_none_are_refused_in_one_line(change: dict[str, Any]) -> None:
    with pytest.raises(BundleError, match="build the bundle again") as caught:
        Common.of(RECORD | change, 13)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("slots", "times", "free", "limits", "gains", "temperature"),
    [
        (1, CHEAP, 0, Limits(), 12, 0.0),
        (2, CHEAP, 0, Limits(), 12, 0.8),
        (1, DEAR, 1, Limits(), 6, 0.8),  # a free row, and none that pays
        (1, DEAR, 1, Limits(), 6, 0.0),
        (1, DEAR, 1, Limits(max_draft_tokens=0), 0, 0.0),
    ],
)
def test_what_a_target_has_said_is_drafted_when_it_is_asked_again(
    slots: int,
    times: dict[str, Any],
    free: int,
    limits: Limits,
    gains: int,
    temperature: float,
) -> None:
    """Where rows are cheap or free; the same text comes of it, and nothing of a text under another salt."""
    loop = PricedLoop(HashModel(3), None, times, slots, limits, looks_up=True, free=free)
    prompts, accepted, outputs = [[7, 3, 9 + slot] for slot in range(slots)], list[int](), list[list[int]]()
    for salt in ("a", "a", "b"):
        done = loop.run(*prompts, count=40, temperature=temperature, seed=3, cache_salt=salt)
        told = [each.metrics.speculative_decoding for each in done]
        accepted.append(sum(each.num_accepted_draft_tokens for each in told))
        outputs.append([token for each in done for token in each.output])
    assert outputs[0] == outputs[1] == outputs[2]
    assert accepted[1] >= gains + max(accepted[0], accepted[2]) if gains else max(accepted) < 3
