"""Drift: a shift is found within 500 requests, in 20 quiet days next to nothing, and the index has its known values."""

import numpy as np
import pytest

from specbuild.measure.drift import Reference, Signal
from specbuild.measure.evidence import log_e

DAY = 86_400  # requests, one a second
SIGNALS = {  # a server's, as random draws: where the share or the mean is `at`
    "acceptance": lambda rng, n, at=0.65: np.clip(rng.normal(at, 0.15, n), 0, 1),
    "tokens": lambda rng, n, at=120: np.minimum(rng.geometric(1 / at, n), 256).astype(float),
    "cut": lambda rng, n, at=0.2: (rng.random(n) < at).astype(float),
    "logprob": lambda rng, n, at=-1.0: at * rng.gamma(4, 0.25, n),
}
SHIFTED = {"acceptance": 0.55, "tokens": 70, "cut": 0.45, "logprob": -1.6}


def alarms(reference, values):
    """How often a fresh detector would be at an alarm, all values at once; see `evidence.detector`."""
    factors = reference.log_factors(values)
    total = np.cumsum(factors, axis=0)
    before = np.logaddexp.accumulate(factors - total, axis=0)
    return int((log_e((total + before).reshape(len(values), -1)) >= np.log(1e8)).sum())


@pytest.mark.parametrize("name", SIGNALS)
def test_a_planted_shift_is_found_within_500_requests_and_a_quiet_hour_is_quiet(name):
    draw, shifted = SIGNALS[name], SHIFTED[name]
    for seed in range(3):
        rng = np.random.default_rng(seed)
        signal = Signal(Reference(draw(rng, 1000)))
        assert not [each for each in draw(rng, 1800) if signal.add(each)]
        found = [alarm for each in draw(rng, 500, shifted) if (alarm := signal.add(each))]
        assert found[0].direction == ("higher" if shifted > signal.reference.mean else "lower"), seed


@pytest.mark.parametrize(("spread", "direction"), [(2.0, "wider"), (0.4, "narrower")])
def test_what_lies_wider_or_closer_together_has_drifted_too(spread, direction):
    rng = np.random.default_rng(1)
    signal = Signal(Reference(rng.normal(0, 1, 1000)))
    found = [alarm for each in rng.normal(0, spread, 500) if (alarm := signal.add(each))]
    assert found[0].direction == direction


def test_an_alarm_says_what_moved_and_a_signal_begins_again_after_it():
    rng = np.random.default_rng(2)
    signal = Signal(Reference(rng.normal(5, 1, 1000)))
    (first, alarm), (second, _), *_ = [
        (place, alarm) for place, each in enumerate(rng.normal(7, 1, 400)) if (alarm := signal.add(each))
    ]
    assert (alarm.reference, alarm.recent) == (pytest.approx(5, abs=0.1), pytest.approx(7, abs=0.3))
    assert alarm.psi > 0.25
    assert second >= 1.5 * first, "not with the very next value"


def test_the_index_is_zero_for_the_reference_and_as_written_out_by_hand():
    reference = Reference(np.arange(1000))
    assert reference.stability(list(range(1000))) == pytest.approx(0, abs=1e-3)
    assert reference.stability([]) == 0
    there, here = np.array([100.5] * 10) / 1005, np.array([500.5] + [0.5] * 9) / 505
    assert reference.stability([0.0] * 500) == pytest.approx(float(((here - there) * np.log(here / there)).sum()))


def test_a_constant_has_drifted_only_when_it_changes():
    constant = Signal(Reference([0.0] * 500))
    assert not [each for each in [0.0] * 2000 if constant.add(each)]
    assert constant.psi == pytest.approx(0, abs=1e-9)
    assert [each for each in [1.0] * 500 if constant.add(each)]


@pytest.mark.slow
@pytest.mark.soak(only=("20",))
@pytest.mark.parametrize("days", [1, 20])
def test_quiet_days_have_one_false_alarm_at_most(days):
    rng, found = np.random.default_rng(4), 0
    for draw in SIGNALS.values():
        reference = Reference(draw(rng, 1000))
        found += sum(alarms(reference, draw(rng, DAY)) > 0 for _ in range(days))
    assert found <= days // 20
