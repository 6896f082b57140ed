"""The oracle's benchmark: honest requests are equal, and a flipped bit of the speculative path is found."""

import pytest

from benchmarks.serve import shadow_oracle

pytestmark = pytest.mark.nightly


def test_honest_requests_are_equal_and_a_flipped_weight_is_found_at_once(bundle):
    assert shadow_oracle.silence(bundle, 24)["outcomes"] == {"equal": 24}
    found = shadow_oracle.find(bundle, seed=1)  # an exponent's largest bit
    assert found["bit"] == 6
    assert found["outcomes"]["different"] >= 1
