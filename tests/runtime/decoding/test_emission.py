"""The target's choices are the sampler's; what is no number is refused, and a text ends where it should."""

import math

import numpy as np
import pytest
from hash_models import sequence_of

from specbuild.runtime.decoding.emission import Emission
from specbuild.runtime.errors import ExecutionError
from specbuild.runtime.sampling.sampler import SamplingParams

VOCAB = 12
PROCESSORS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.02},
    {"repetition_penalty": 1.6, "logit_bias": {3: 9.0}},
]


def row_of(seed):
    return np.random.default_rng(seed).normal(0, 2, VOCAB).astype(np.float32)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_no_number_is_refused_and_not_noted(processors, wrong):
    sequence = sequence_of([1, 2], SamplingParams(logprobs=2, speculation="off", **processors))
    row = row_of(1)
    row[7] = wrong
    with pytest.raises(ExecutionError, match=f"the model gave {wrong} as a token's logit: build the bundle"):
        Emission(frozenset()).choose(sequence, row, 1)
    assert (sequence.logprobs, sequence.output) == ([], [])
