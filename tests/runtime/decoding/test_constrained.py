"""Constrained texts have the model's distribution among what is allowed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from constraints import OneOf, fits, loop_of, probabilities
from device_requests import run

from specbuild.runtime import SamplingParams

VOCAB, END = 12, 11


@pytest.mark.soak(only=("best:8",))
@pytest.mark.nightly
@pytest.mark.parametrize("tree", ["topk:2,3", "best:8"])
def test_the_distribution_is_the_model_s_among_what_is_allowed(
    hash_model: Any, hash_executor: Any, request_of: Any, tree: str
) -> None:
    """χ² against the enumeration of all texts, token by token among what is legal."""
    model = hash_model(4)
    constraint = OneOf(((0, 1, 2), (0, 1, 3), (0, 4), (5, 6, 7, 8), (5, 6, 9), (5, 2), (10, 10), (3,)), END)
    base, draws = SamplingParams(temperature=1.0, seed=0, max_new_tokens=9, constraint=constraint), 3000
    expected = probabilities(model, [7, 7], constraint, base)
    assert sum(expected.values()) == pytest.approx(1)
    loop = loop_of(hash_model, hash_executor, 4, "model")
    wanted = [request_of([7, 7], replace(base, seed=n, speculation=tree)) for n in range(draws)]
    seen = Counter(tuple(s.output) for s in run(loop, wanted))
    fits(seen, expected)
    assert sum(s.metrics.speculative_decoding.num_accepted_draft_tokens for s in wanted) > draws / 4
