"""Attacks by sampling parameters and constraints: one line that names the field, and no other request notices."""

import math
from typing import Any

import numpy as np
import pytest
from campaign.parameters import ODD

from specbuild.runtime import SamplingParams, TokenLogprobs
from specbuild.runtime.errors import ExecutionError, OptionError
from specbuild.runtime.sampling.sampler import Sampler

VOCAB = 64


class Hostile:
    """Whatever is asked of it raises."""

    def __repr__(self):
        raise ValueError("no\nrepr")

    __str__ = __iter__ = __len__ = __bool__ = __eq__ = __hash__ = __float__ = __index__ = __repr__

    @property
    def matcher(self):
        raise RuntimeError("no\nmatcher")


class Lying(str):
    """A text that is another whenever somebody looks."""

    def __str__(self):
        return "x" * 10**6

    __repr__ = __str__

    def __len__(self):
        return 1

    def __hash__(self):
        raise ValueError("no hash")


class Items(dict[Any, Any]):
    def items(self):
        raise KeyError("no\nitems")


VALUES = [
    *(value for value in ODD if not isinstance(value, str) or len(value) < 10**5),
    *(10**400, -(10**400), "9" * 5000, "x" * 10**7, b"x" * 10**6, "\ud800", Lying("x" * 300), Hostile(), Items()),
    *([Hostile()], ["x"] * 10_000, list(range(10_000)), np.zeros(3), np.float64("nan"), np.int64(-1), np.array("x")),
    *({10**5000: 1}, {"9" * 5000: 1}, {1: 10**5000}, {"x" * 10**6: 1}, {1: Hostile()}),
]


@pytest.mark.parametrize("name", sorted(SamplingParams.names()))
def test_any_value_of_any_field_is_taken_or_refused_in_one_line(name):
    refused = 0
    for value in VALUES:
        try:
            params = SamplingParams(**{name: value})
            Sampler(params, 0, [1], VOCAB)
        except OptionError as error:
            refused += 1
            line = str(error)
            assert name in line or (name, "constraint") == ("constraint", line[:10]), line
            assert "\n" not in line
            assert len(line) < 400, line[:400]
    assert refused > 15


def test_a_subclass_s_own_ideas_do_not_reach_the_worker():
    params = SamplingParams(stop=[Lying("ab")], session=Lying("s"), max_new_tokens=np.int64(5), top_p=np.float32(0.5))
    assert [type(each) for each in (*params.stop, params.session)] == [str, str]
    assert (params.stop, params.session) == (("ab",), "s")
    assert (type(params.max_new_tokens), type(params.top_p)) == (int, float)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize(
    "given",
    [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 1e-12}, {"temperature": 100.0, "top_k": 5, "min_p": 1.0}],
)
def test_a_broken_logit_is_the_token_that_is_then_refused(broken, given):
    """And no cut-off asks for every token of the vocabulary first."""
    row = np.random.default_rng(1).normal(size=VOCAB).astype(np.float32)
    row[17] = broken
    sampler = Sampler(SamplingParams(**given), 5, [1], VOCAB)
    assert sampler.choose(row, 3, ()) == 17, "whose logit is not finite, which ends the request"
    if given:
        assert list(sampler.ranked(row, 3, ())) == []


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_log_probabilities_beside_a_broken_logit_are_an_error(broken):
    with pytest.raises(ExecutionError, match="NaN or infinity"):
        TokenLogprobs.of(np.array([1.0, broken, 0.0], np.float32), 0, 2)


@pytest.mark.parametrize("stop", [["x"] * 65, "x" * 10**8, ["x" * 4096, "y"], ["a\ud800"]], ids=range(4))
def test_more_stop_strings_than_there_is_room_for(stop):
    with pytest.raises(OptionError, match=r"^stop ") as caught:
        SamplingParams(stop=stop)
    assert len(str(caught.value)) < 300
