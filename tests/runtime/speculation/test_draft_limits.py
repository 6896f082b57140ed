"""What an operator allows: validated, and by batch size."""

from __future__ import annotations

from typing import Any

import pytest

from specbuild.runtime.errors import OptionError
from specbuild.runtime.speculation.draft_limits import NO_LIMITS, Limits

SCHEDULES = ({"1-2": 8, "5-16": 2}, [[5, 16, 2], [1, 2, 8]], '{"1-2": 8, "5-16": 2}', "[[1, 2, 8], [5, 16, 2]]")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_both_forms_of_vllm(schedule: Any) -> None:
    limits = Limits(num_speculative_tokens_per_batch_size=schedule)
    assert [limits.max_nodes(batch, 10) for batch in (1, 2, 3, 4, 5, 16, 17)] == [8, 8, 8, 8, 2, 2, 2]
    assert limits.max_nodes(1, 3) == 3


def test_the_least_counts() -> None:
    limits = Limits(max_draft_tokens=4, num_speculative_tokens_per_batch_size=[[2, 4, 6], [5, 8, 0]])
    assert [limits.max_nodes(batch, 10) for batch in (1, 2, 5)] == [4, 4, 0]
    assert NO_LIMITS.max_nodes(3, 10) == 10


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_draft_tokens": -1},
        {"max_draft_tokens": True},
        {"max_draft_tokens": 2.0},
        {"min_expected_speedup": 0.5},
        {"min_expected_speedup": float("nan")},
        {"min_expected_speedup": "2"},
        {"num_speculative_tokens_per_batch_size": 3},
        {"num_speculative_tokens_per_batch_size": "1-4"},
        {"num_speculative_tokens_per_batch_size": {"1": 3}},
        {"num_speculative_tokens_per_batch_size": {"4-1": 3}},
        {"num_speculative_tokens_per_batch_size": {"1-4": -3}},
        {"num_speculative_tokens_per_batch_size": [[1, 4]]},
        {"num_speculative_tokens_per_batch_size": [[0, 4, 1]]},
        {"num_speculative_tokens_per_batch_size": [[1, 4, 3], [4, 8, 1]]},
        {"num_speculative_tokens_per_batch_size": [[1, 4, 3.5]]},
    ],
)
def test_what_is_wrong_is_named(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(OptionError, match=name):
        Limits(**wrong)
