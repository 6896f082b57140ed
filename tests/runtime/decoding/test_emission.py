"""The target's choices are the sampler's; what is no number is refused, and a text ends where it should."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hash_models import sequence_of

from specbuild.runtime.decoding.emission import Emission
from specbuild.runtime.errors import ExecutionError
from specbuild.runtime.sampling.logprobs import TokenLogprobs
from specbuild.runtime.sampling.sampler import SamplingParams

VOCAB = 12
PROCESSORS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.02},
    {"repetition_penalty": 1.6, "logit_bias": {3: 9.0}},
]


def row_of(seed: int) -> Any:
    return np.random.default_rng(seed).normal(0, 2, VOCAB).astype(np.float32)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_no_number_is_refused_and_not_noted(processors: dict[str, Any], wrong: float) -> None:
    sequence = sequence_of([1, 2], SamplingParams(logprobs=2, speculation="off", **processors))
    row = row_of(1)
    row[7] = wrong
    with pytest.raises(ExecutionError, match=f"the model gave {wrong} as a token's logit: build the bundle") as caught:
        Emission(frozenset()).choose(sequence, row, 1)
    assert "\n" not in str(caught.value)
    assert (sequence.logprobs, sequence.output) == ([], [])


@pytest.mark.parametrize("count", [0, 3, VOCAB])
def test_log_probabilities_are_the_rows_own(count: int) -> None:
    """Of the model's logits before any processor, for each token that is chosen."""
    params = SamplingParams(logprobs=count, temperature=1.3, repetition_penalty=1.5, speculation="off")
    sequence, emission = sequence_of([1, 2], params), Emission(frozenset())
    rows = [row_of(seed) for seed in range(6)]
    tokens = [emission.choose(sequence, row, position) for position, row in enumerate(rows, 1)]
    assert sequence.logprobs == [TokenLogprobs.of(row, t, count) for row, t in zip(rows, tokens, strict=True)]
    for told, row in zip(sequence.logprobs, rows, strict=True):
        assert told.logprob == pytest.approx(row[told.token_id] - np.log(np.exp(row.astype(np.float64)).sum()))
        assert len(told.top) == count
