"""Trials: what is planted is rolled back, equal arms seldom, and nothing is promoted that is worse by its margin."""

import json

import numpy as np
import pytest

from specbuild.measure.trial import Metric, Trial

TEN = float(np.log(1.1))
METRICS = (
    Metric("ttft", "time", margin=TEN),
    Metric("tpot", "time", margin=TEN),
    Metric("e2el", "time"),
    Metric("errors", "share", margin=0.02),
    Metric("cut", "share", "either"),
    Metric("tokens", "count", "either"),
    Metric("acceptance", "share", "lower"),
)
ALPHA, RUNS = 0.05, 100


def requests(rng, candidate, slower=1.0, sigma=0.3, failing=0.003):
    """Values of one request of each run: log-normal times with a heavy tail, lengths up to a limit, few errors."""
    runs = len(candidate)
    heavy = np.where(rng.random(runs) < 0.03, rng.exponential(1.0, runs), 0.0)
    times = np.where(candidate, slower, 1.0) * np.exp(rng.normal(0, sigma, (2, runs)) + heavy)
    tokens = np.minimum(rng.geometric(1 / 120, runs), 256)
    ttft, tpot = 0.1 * times[0], np.where(tokens > 1, 0.02 * times[1], np.nan)
    whole = ttft + np.where(tokens > 1, tpot * (tokens - 1), 0)
    failed = rng.random(runs) < np.where(candidate, failing, 0.003)
    acceptance = np.clip(rng.normal(0.6, 0.15, runs), 0, 1)
    return np.stack([ttft, tpot, whole, failed * 1.0, (tokens == 256) * 1.0, tokens * 1.0, acceptance], axis=-1)


def run(runs, count, seed, **planted):
    """Requests until each run is rolled back, and until it is promoted, under a share that steps from 10 % to 50 %."""
    rng, trial = np.random.default_rng(seed), Trial(METRICS, ALPHA, (runs,))
    back, on = np.full(runs, np.inf), np.full(runs, np.inf)
    for number in range(count):
        weight = min(0.1 + 0.1 * (number // 60), 0.5)
        candidate = rng.random(runs) < weight
        trial.add(candidate, weight, requests(rng, candidate, **planted))
        back[trial.rolled_back() & np.isinf(back)] = number + 1
        on[trial.promoted() & np.isinf(on)] = number + 1
    return back, on


def trial_of(metrics, count, seed, **planted):
    """One trial of the first of METRICS, half of whose requests go to the candidate."""
    rng, trial = np.random.default_rng(seed), Trial(metrics, ALPHA)
    for _ in range(count):
        candidate = rng.random(1) < 0.5
        trial.add(bool(candidate[0]), 0.5, requests(rng, candidate, **planted)[0, : len(metrics)])
    return trial


@pytest.mark.slow(but=("0.2",))
@pytest.mark.parametrize("sigma", [0.2, 0.4])
def test_a_candidate_ten_per_cent_slower_is_rolled_back_within_2000_requests(sigma):
    back, on = run(40, 2000, seed=1, slower=1.1, sigma=sigma)
    assert np.isfinite(back).sum() >= 38
    assert (on < back).sum() == 0


@pytest.mark.slow
def test_equal_arms_are_rolled_back_no_more_often_than_alpha_and_are_promoted():
    back, on = run(200, 2000, seed=2)
    assert np.isfinite(back).sum() <= ALPHA * 200
    assert (on < back).sum() >= 180


@pytest.mark.slow
def test_a_candidate_that_fails_more_often_is_rolled_back():
    assert np.isfinite(run(20, 1000, seed=3, failing=0.05)[0]).sum() >= 19


@pytest.fixture(scope="module")
def slow():
    """A trial whose candidate takes half as long again."""
    return trial_of(METRICS, 300, seed=4, slower=1.5)


def test_a_verdict_has_its_evidence(slow):
    verdict = slow.verdict()
    assert verdict.kind == "rollback"
    assert verdict.evidence.metric in ("ttft", "tpot", "e2el")
    assert verdict.e >= 1 / ALPHA
    baseline, candidate = verdict.evidence.means
    assert 1.3 < candidate / baseline < 1.7
    assert 250 < sum(verdict.evidence.n) <= 300
    assert json.loads(json.dumps(verdict.to_dict()))["kind"] == "rollback"


def test_a_faster_one_is_promoted_for_the_metric_that_was_settled_last():
    few, many = (trial_of(METRICS[:2], count, seed=5, slower=0.8) for count in (10, 400))
    assert (few.verdict().kind, many.verdict().kind) == ("hold", "promote")
    assert many.verdict().e == min(each.fine for each in many.evidence() if each.fine is not None)


def test_what_is_lower_or_other_is_harm_where_it_is_so_said():
    rng, trial = np.random.default_rng(6), Trial(METRICS[4:], ALPHA)
    for _ in range(300):
        candidate = rng.random() < 0.5
        trial.add(
            candidate, 0.5, np.array([0.0, 60.0 if candidate else 90.0, 0.5 + 0.2 * candidate + rng.random() / 9])
        )
    cut, tokens, acceptance = trial.evidence()
    assert cut.harm == 1, "nothing differs"
    assert tokens.harm > 20, "shorter counts"
    assert acceptance.harm < 1, "more is better"
    assert (cut.fine, tokens.means[1]) == (None, pytest.approx(60))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("candidate", "baseline", "back", "on"),
    [(0.05, 0.02, 0.95, 0), (0.005, 0.5, 0, 0.95), (0.02, 0.02, 0, 0)],
    ids=["broken", "kept", "neither is proven"],
)
def test_an_objective_is_the_candidates_alone(candidate, baseline, back, on):
    rng, trial = np.random.default_rng(7), Trial([Metric("errors", "share", ceiling=0.02)], ALPHA, (RUNS,))
    rolled_back, promoted = np.zeros((2, RUNS), bool)
    for _ in range(1500):
        drawn = rng.random(RUNS) < 0.5
        failed = rng.random(RUNS) < np.where(drawn, candidate, baseline)
        trial.add(drawn, 0.5, failed[:, None] * 1.0)
        rolled_back |= trial.rolled_back()
        promoted |= trial.promoted() & ~rolled_back
    for share, expected in ((rolled_back.mean(), back), (promoted.mean(), on)):
        assert share >= expected if expected else share <= ALPHA


def test_nothing_of_a_metric_is_no_evidence():
    trial = Trial(METRICS, ALPHA)
    trial.add(True, 0.5, np.full(len(METRICS), np.nan))
    verdict = trial.verdict()
    assert (verdict.kind, verdict.e, verdict.evidence.n, verdict.evidence.means) == ("hold", 1, (0, 0), (None, None))


def test_it_goes_on_from_its_state(slow):
    other = Trial(METRICS, ALPHA)
    other.restore(json.loads(json.dumps(slow.state())))
    for trial in (slow, other):
        trial.add(True, 0.5, np.ones(len(METRICS)))
    assert other.evidence() == slow.evidence()
    for wrong in (Trial(METRICS[:2], ALPHA).state(), slow.state() | {"n": [[float("nan")] * 7] * 2}):
        with pytest.raises(ValueError, match="other metrics"):
            other.restore(wrong)
