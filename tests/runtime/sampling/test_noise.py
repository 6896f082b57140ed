"""The noise of one position: which words it is made of, and that no more of it is computed than asked for."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_sampler import gumbel

from specbuild.runtime.sampling.noise import LEAST, Noise
from specbuild.runtime.sampling.noise import gumbel as gumbel_of


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (1, 2), (2**64 - 1, 1023), (123456789, 7)])
def test_noise_is_word_x_of_philox_for_token_x(seed: int, position: int) -> None:
    bits = np.random.Philox(key=np.array([seed, position], dtype=np.uint64))
    words = [int(bits.random_raw()) for _ in range(32)]
    expected = [-math.log(-math.log((word + 0.5) / 2**64)) for word in words]
    noise = Noise(seed, position, 32).all
    assert noise.dtype == np.float32
    np.testing.assert_allclose(noise, expected, rtol=1e-6, atol=1e-6)
    assert np.array_equal(noise, gumbel(seed, position, 32))
    assert np.array_equal(noise, gumbel(seed, position, 4 * 32)[:32])


def test_noise_is_standard_gumbel_and_differs_by_seed_and_position() -> None:
    noise = gumbel(3, 4, 200_000).astype(np.float64)
    assert np.isfinite(noise).all()
    assert abs(noise.mean() - 0.57722) < 0.015
    assert abs(noise.var() - math.pi**2 / 6) < 0.04
    others = [gumbel(3, 5, 1000), gumbel(4, 4, 1000), gumbel(4, 3, 1000)]
    assert all(abs(np.corrcoef(noise[:1000], other)[0, 1]) < 0.15 for other in others)


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 5000), st.sets(st.integers(0, 9_999), min_size=1, max_size=12))
def test_the_noise_of_few_tokens_is_theirs_alone(seed: int, position: int, tokens: set[int]) -> None:
    noise, asked = Noise(seed, position, 10_000), np.array(sorted(tokens))
    found = noise.of(asked)
    assert np.array_equal(found, gumbel(seed, position, 10_000)[asked])
    assert np.array_equal(found, Noise(seed, position, 10_000).all[asked])
    assert noise.one(int(asked[0])) == pytest.approx(found[0], rel=1e-6)


def test_all_words_are_made_once_many_are_asked_for() -> None:
    noise, asked = Noise(1, 2, 49_152), np.arange(7, 17)
    few = noise.few
    assert few > 50
    for times in range(1, few // 10 + 1):
        noise.of(asked)
        assert noise.few == few - 10 * times
    noise.of(asked)
    assert noise.few == 0, "all are there"
    assert np.array_equal(noise.of(asked), gumbel(1, 2, 49_152)[asked])


@pytest.mark.parametrize("least", [-math.inf, -4.0, LEAST, -3.5, -1.0, 0.0, 2.0, 7.5, 11.0, 36.0, 40.0, 1e30])
def test_nobody_who_reaches_a_threshold_is_left_out_and_hardly_anybody_else_stays(least: float) -> None:
    noise, values = Noise(3, 4, 100_000), gumbel(3, 4, 100_000)
    mask = noise.reaching(least)
    if mask is None:
        assert least <= LEAST
    else:
        assert mask[values >= least].all()
        assert not mask[values < least - 1e-5].any()


def test_thresholds_hold_at_the_largest_words() -> None:
    """Where a 64-bit word has more digits than a float64."""
    noise = Noise(0, 0, 64)
    noise.words = np.array([2**64 - 1 - (1 << bit) for bit in range(64)], dtype=np.uint64)
    values = gumbel_of(noise.words)
    for least in values.tolist():
        mask = noise.reaching(least)
        assert mask is None or mask[values >= least].all()


def test_the_leader_has_the_most_noise_and_leaders_are_many_enough() -> None:
    noise, values = Noise(6, 7, 49_152), gumbel(6, 7, 49_152)
    assert noise.lead == values.argmax()
    assert noise.largest == pytest.approx(values.max(), rel=1e-6)
    for count in (1, 4, 30):
        leaders = noise.leaders(count)
        assert count <= leaders.size <= 8 * count + 40
        assert values[leaders].min() > np.delete(values, leaders).max()
    assert Noise(6, 7, 10).leaders(4).size >= 4
