"""E-processes: equal to another implementation's, quiet under their nulls, and quick to find what is there."""

import numpy as np
import pytest
from data_files import table
from hypothesis import given
from hypothesis import strategies as st

from specbuild.measure.evidence import (
    Scale,
    bernoulli,
    contrast,
    detector,
    e_process,
    log_e,
    log_factors,
    restarted,
    start,
)

ALPHA, RUNS = 0.05, 200
BAR = np.log(1 / ALPHA)
X = np.random.default_rng(28).beta(6, 4, size=200)
COINS = (np.random.default_rng(29).random(300) < 0.1).astype(float)
# By confseq 0.0.11 of PyPI (Waudby-Smith's own), after so many values: the mean over FRACTIONS f of
# `betting_mart(x, m, lambdas_fn_positive=lambda x, m: np.full(len(x), f / m), theta=1, trunc_scale=1)`.
# Its wheel needs Boost and does not compile for Python 3.11, so its pure part was run once from its sources:
# PYTHONPATH=confseq-0.0.11/src, with `numpy.float_ = numpy.float64`.
CONFSEQ = [*zip((X, 1 - X, COINS), (0.5, 0.45, 0.05), table("confseq.json"), strict=True)]


@pytest.mark.parametrize(("values", "mean", "expected"), CONFSEQ)
def test_it_is_confseqs(values, mean, expected):
    found = np.exp(e_process(values, mean))
    assert found[[int(n) - 1 for n in expected]] == pytest.approx(list(expected.values()), rel=1e-9)


def test_sides_mirror_each_other():
    assert e_process(X, 0.3, "below") == pytest.approx(e_process(1 - X, 0.7))
    both = np.log((np.exp(e_process(X, 0.3)) + np.exp(e_process(X, 0.3, "below"))) / 2)
    assert e_process(X, 0.3, "either") == pytest.approx(both)


def test_value_by_value_is_as_all_at_once_and_no_observation_changes_nothing():
    capital, alarm = start((2,)), np.full((2, 6), -np.inf)
    for x in X:
        for value in (x, np.nan):
            factors = log_factors([value, 1 - value], 0.5)
            capital = capital + factors
            if not np.isnan(value):
                alarm = restarted(alarm, factors)
    assert log_e(capital) == pytest.approx([e_process(X, 0.5)[-1], e_process(1 - X, 0.5)[-1]])
    assert log_e(alarm) == pytest.approx([detector(X, 0.5)[-1], detector(1 - X, 0.5)[-1]])


@pytest.mark.parametrize(
    ("mean", "side", "successes", "failures"), [(0.2, "below", 0.2, 0.8), (0.5, "above", 1, 1), (0.6, "either", 6, 4)]
)
def test_false_alarms_stay_below_alpha_however_often_one_looks(mean, side, successes, failures):
    values = np.random.default_rng(3).beta(successes, failures, (2000, RUNS))
    assert (e_process(values, mean, side) >= BAR).any(axis=0).sum() <= ALPHA * RUNS


def test_bets_on_outcomes_are_ratios_of_likelihoods():
    successes, n, rate = COINS.sum(), len(COINS), 0.05
    higher = rate * np.exp(log_factors([1.0], rate, fractions=bernoulli(rate)))[0]
    assert ((rate < higher) & (higher < 1)).all()
    ratios = (higher / rate) ** successes * ((1 - higher) / (1 - rate)) ** (n - successes)
    found = log_factors(COINS, rate, fractions=bernoulli(rate)).sum(axis=0)
    assert np.exp(log_e(found)) == pytest.approx(ratios.mean())


@pytest.mark.parametrize(
    ("rate", "side", "low", "high"),
    [(0.01, "above", 0, ALPHA), (0.01, "below", 0, ALPHA), (0.02, "above", 0.9, 1), (0.003, "below", 0.9, 1)],
)
def test_a_low_rate_that_is_doubled_is_found_and_one_that_is_just_kept_is_not(rate, side, low, high):
    values = np.random.default_rng(9).random((3000, RUNS)) < rate
    factors = log_factors(values, 0.01, side, bernoulli(0.01 if side == "above" else 0.99))
    assert low <= (log_e(np.cumsum(factors, axis=0)) >= BAR).any(axis=0).mean() <= high


def test_a_detector_finds_a_change_after_a_long_quiet_time_and_e_processes_do_not():
    rng = np.random.default_rng(5)
    values = np.concatenate([rng.beta(6, 4, 20_000), rng.beta(7.5, 2.5, 300)])
    assert detector(values, 0.6, "either")[:20_000].max() < np.log(1e6) < detector(values, 0.6, "either").max()
    assert e_process(values, 0.6, "either").max() < np.log(1e6)


@given(st.floats(0.01, 0.99), st.floats(-1, 1))
def test_contrasts_have_mean_one_half_whatever_the_score(weight, score):
    with_it, without = contrast([True, False], weight, score)
    assert 0 <= min(with_it, without) <= max(with_it, without) <= 1
    assert weight * with_it + (1 - weight) * without == pytest.approx(0.5)


def test_scores_are_bounded_by_what_came_before():
    scale = Scale.of([np.nan, 1.0])
    rng = np.random.default_rng(8)
    assert scale.score(np.array([5.0, 1.0])).tolist() == [0, 0], "nothing is known yet"
    for _ in range(100):
        scale.add(np.array([rng.normal(3, 0.5), float(rng.random() < 0.25)]))
    assert scale.score(np.array([1e9, 1.0])) == pytest.approx([1.0, 1 - scale.mean[1]])
    assert scale.score(np.array([3.0, np.nan])) == pytest.approx([0.0, np.nan], abs=0.2, nan_ok=True)
    before = scale.mean.copy()
    scale.add(np.array([1e9, np.nan]))
    assert scale.mean[0] < before[0] + 0.1, "one far away moves it little"
    assert scale.mean[1] == before[1]
