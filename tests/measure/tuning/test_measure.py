"""A bundle can be tuned that has room for its texts; tests/measure/tuning/test_tune.py has what is measured."""

import pytest
from campaign.bundle_copy import put

from specbuild.measure.tuning.measure import Tuning, measure
from specbuild.measure.tuning.tune import tune_build
from specbuild.runtime import SamplingParams
from specbuild.runtime.errors import OptionError
from specbuild.runtime.requests.prompt_file import Request


def test_bundles_of_short_texts_are_refused_and_built_without(bundle_copy):
    """The shortest that can be tuned has no room after a prompt of more than half of it."""
    prompts = [Request(" x" * 17, SamplingParams(), where="f:1")]
    for length, told in ((32, "f:1: leaves no room for 16 tokens in 32"), (31, "has texts of 31 tokens at most")):
        put(bundle_copy, "report.json", b"{}", hashed=True, max_seq_len=length)
        with pytest.raises(OptionError, match=told):
            measure(bundle_copy, Tuning(prompts))
    assert tune_build(bundle_copy) is None
