"""Ceilings: how they are asked for, and what a request says of each."""

from __future__ import annotations

import pytest

from specbuild.runtime.errors import OptionError
from specbuild.serve.ceilings import held, parse


def test_shares_and_times_may_be_mixed_and_repeated() -> None:
    found = parse(["errors=0.01,ttft=0.5,tpot=0.05,p99", " cut = 0.3 ", "e2el=2,p50"])
    told = {each.name: (each.of, each.above, pytest.approx(each.share)) for each in found}
    assert told == {
        "errors<=0.01": ("errors", None, 0.01),
        "cut<=0.3": ("cut", None, 0.3),
        "ttft_p99<=0.5": ("ttft", 0.5, 0.01),
        "tpot_p99<=0.05": ("tpot", 0.05, 0.01),
        "e2el_p50<=2": ("e2el", 2.0, 0.5),
    }
    assert parse([]) == ()


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["errors=0"], "above 0 and below 1"),
        (["cut=1"], "above 0 and below 1"),
        (["invalid=few"], "above 0 and below 1"),
        (["errors=nan"], "above 0 and below 1"),
        (["errors=0.1,errors=0.2"], "twice"),
        (["errors=0.1,p99"], "no time before it"),
        (["colour=1"], "^canary_objective 'colour=1': 'colour=1' is no time"),
        ([""], "has no time"),
    ],
)
def test_what_is_refused(texts: list[str], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        parse(texts)


def test_a_request_breaks_a_time_or_does_not_and_says_nothing_of_what_it_has_not() -> None:
    ceilings = parse(["errors=0.01,cut=0.5", "ttft=0.5,p99"])
    told = {"errors": 0.0, "cut": 0.25, "ttft": 0.6}
    assert dict(held(ceilings, told)) == {"errors<=0.01": 0.0, "cut<=0.5": 0.25, "ttft_p99<=0.5": 1.0}
    assert dict(held(ceilings, {"errors": 1.0})) == {"errors<=0.01": 1.0}
