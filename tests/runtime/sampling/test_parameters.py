"""Parameters: two names of one, and their bounds. The fields' values are tried in test_sampler.py and by attacks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbuild.runtime.errors import OptionError
from specbuild.runtime.sampling.parameters import SamplingParams, renamed


def test_two_names_of_one_parameter():
    assert renamed({"max_tokens": 3, "n": 1}) == {"max_new_tokens": 3, "n": 1}
    assert renamed({"max_new_tokens": 3}) == {"max_new_tokens": 3}
    with pytest.raises(OptionError, match="one parameter"):
        renamed({"max_tokens": 3, "max_new_tokens": 3})


@given(st.floats(0, 0.01, exclude_min=True, exclude_max=True))
def test_a_temperature_below_the_smallest_is_greedy(temperature):
    params = SamplingParams(temperature=temperature, top_k=3)
    assert params == SamplingParams(temperature=0.0, top_k=3)
    assert params.temperature == 0
    assert SamplingParams(temperature=0.01).temperature == 0.01
