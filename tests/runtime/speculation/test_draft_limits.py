"""What an operator allows: validated, and by batch size."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from specbuild.runtime.errors import OptionError
from specbuild.runtime.speculation.draft_limits import NO_LIMITS, Limits

SCHEDULES = ({"1-2": 8, "5-16": 2}, [[5, 16, 2], [1, 2, 8]], '{"1-2": 8, "5-16": 2}', "[[1, 2, 8], [5, 16, 2]]")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_both_forms_of_vllm(schedule):
    limits = Limits(num_speculative_tokens_per_batch_size=schedule)
    assert [limits.max_nodes(batch, 10) for batch in (1, 2, 3, 4, 5, 16, 17)] == [8, 8, 8, 8, 2, 2, 2]
    assert limits.max_nodes(1, 3) == 3


def test_the_least_counts():
    limits = Limits(max_draft_tokens=4, num_speculative_tokens_per_batch_size=[[2, 4, 6], [5, 8, 0]])
    assert [limits.max_nodes(batch, 10) for batch in (1, 2, 5)] == [4, 4, 0]
    assert NO_LIMITS.max_nodes(3, 10) == 10


NO_RANGES = st.one_of(
    st.integers(),
    st.text("0123456789-[]{}:, "),
    st.dictionaries(st.sampled_from(["1", "4-1", "0-3", "a-b"]), st.integers(0, 9), min_size=1),
    st.dictionaries(st.just("1-4"), st.integers(max_value=-1), min_size=1),
    st.lists(st.tuples(st.integers(max_value=0), st.integers(), st.integers()), min_size=1),
    st.sampled_from([[[1, 4]], [[1, 4, 3], [4, 8, 1]], [[1, 4, 3.5]]]),
)
WRONG = st.one_of(
    st.tuples(st.just("max_draft_tokens"), st.one_of(st.integers(max_value=-1), st.floats(), st.booleans(), st.text())),
    st.tuples(
        st.just("min_expected_speedup"),
        st.one_of(st.floats(max_value=0.99), st.floats(min_value=1001), st.just(math.nan), st.booleans(), st.text()),
    ),
    st.tuples(st.just("num_speculative_tokens_per_batch_size"), NO_RANGES),
)


@given(WRONG)
def test_what_is_wrong_is_named_in_one_line(wrong):
    assume(wrong[1] not in ("[]", "{}"))  # a schedule without ranges
    with pytest.raises(OptionError, match=wrong[0]):
        Limits(**dict([wrong]))
