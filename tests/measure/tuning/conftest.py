"""A fixture of the tuning's tests: texts that were never decoded, whose rounds took what a test says."""

from types import SimpleNamespace

import pytest

from specbuild.measure.tuning.decode import Decoded
from specbuild.runtime import RunStats


@pytest.fixture
def decoded():
    """`decoded(rounds, tokens, verify, around, draft)`: seconds of a round, `draft` of those `around`, or else half."""

    def make(rounds, tokens, verify, around=0.0, draft=None):
        drafted = around / 2 if draft is None else draft
        seconds = [each * rounds for each in (verify + around, drafted, verify)]
        text = SimpleNamespace(tokens=list(range(tokens)), metrics=SimpleNamespace(num_prompt_tokens=1))
        return Decoded(text, RunStats(rounds, tokens, *seconds))

    return make
