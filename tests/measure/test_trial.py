"""Trials: a slower candidate is found, equal arms seldom are, and a request that lacks a metric is no evidence."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbuild.measure.trial import Metric, Trial

METRICS = (Metric("ttft"), Metric("tokens_per_second", "lower"), Metric("errors", share=True))
ALPHA = 0.05


def run(count, seed, weight=0.3, slower=1.0, sigma=0.3, failing=0.003):
    """A trial, and the request with which harm was proven; requests have log-normal times with a heavy tail."""
    rng, trial, found = random.Random(seed), Trial(METRICS, weight, ALPHA), None
    for number in range(count):
        candidate = rng.random() < weight
        if rng.random() < (failing if candidate else 0.003):
            trial.add(candidate, {"errors": 1.0})
            continue
        factor = slower if candidate else 1.0
        heavy = rng.expovariate(1.0) if rng.random() < 0.03 else 0.0
        ttft, tpot = (factor * math.exp(rng.gauss(0, sigma) + heavy) for _ in range(2))
        trial.add(candidate, {"ttft": 0.1 * ttft, "tokens_per_second": 50 / tpot, "errors": 0.0})
        if found is None and trial.harmful:
            found = number
    return trial, found


@pytest.mark.slow
def test_a_candidate_ten_per_cent_slower_is_found_within_2000_requests():
    assert sum(run(2000, seed, slower=1.1)[1] is not None for seed in range(20)) >= 19


@pytest.mark.slow
def test_equal_arms_are_seldom_told_apart_however_often_one_looks():
    """The bound is 5 %; six of 60 or more would have a chance of 4 % at the bound."""
    assert sum(run(1000, seed)[1] is not None for seed in range(60)) < 6


def test_a_candidate_that_fails_is_found():
    trial, found = run(800, 1, failing=0.2)
    assert found is not None
    assert max(trial.evidence(), key=lambda each: each.harm).metric == "errors"


@pytest.mark.slow
def test_a_faster_candidate_does_no_harm():
    trial, found = run(600, 2, slower=0.5)
    assert found is None
    assert trial.e < 1


def test_means_and_numbers_are_those_of_the_values():
    trial = Trial(METRICS, 0.5, ALPHA)
    for candidate, ttft in ((False, 0.1), (False, 0.4), (True, 0.3)):
        trial.add(candidate, {"ttft": ttft, "errors": 0.0})
    ttft, speed, errors = trial.evidence()
    assert (ttft.n, ttft.means) == ((2, 1), (pytest.approx(0.2), pytest.approx(0.3)))
    assert (speed.n, speed.means, speed.harm) == ((0, 0), (None, None), 1.0)
    assert errors.means == (0.0, 0.0)


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1e300), st.floats(0, 1)), max_size=40))
def test_any_values_leave_finite_evidence(values):
    trial = Trial(METRICS, 0.1, ALPHA)
    for candidate, time, share in values:
        trial.add(candidate, {"ttft": time, "tokens_per_second": time, "errors": share})
    assert 0 <= trial.e < math.inf
    assert all(0 <= each.harm < math.inf for each in trial.evidence())
