"""The noise of one position: which words it is made of, its distribution, and its bounds."""

import math

import numpy as np
import pytest
from plain_sampler import gumbel

from specbuild.runtime.sampling.noise import Noise, exponential, mixed

LARGE = [8193, 9001, 49152]  # the first is no multiple of anything


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (2**64 - 1, 1023), (123456789, 7)])
@pytest.mark.parametrize("vocab", [31, 32, *LARGE])
def test_noise_is_that_of_its_definition(seed, position, vocab):
    """Token by token too, in any order; half word x of Philox for token x, where each runs alone."""
    noise, expected = Noise(seed, position, vocab), gumbel(seed, position, vocab)
    some = np.random.default_rng(1).integers(0, vocab, 50)
    assert np.array_equal(noise.of(some), expected[some])
    assert np.array_equal(noise.all, expected)
    if vocab <= 8192:
        words = np.random.Philox(key=np.array([seed, position], dtype=np.uint64)).random_raw(16).tolist()
        halves = [half for word in words for half in (word % 2**32, word >> 32)]
        wanted = [-math.log(-math.log1p(-(half + 0.5) / 2**32)) for half in halves[:vocab]]
        np.testing.assert_allclose(noise.all, wanted, rtol=1e-6, atol=1e-6)


def test_later_words_are_those_of_split_mix():
    """Vigna's generator; its first words of this seed are well known."""
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert mixed(1234567, np.arange(5)).tolist() == [word >> 32 for word in known]
    assert mixed(2**64 - 1, np.array([0, 2**40])).max() < 2**32


@pytest.mark.parametrize("vocab", [8192, 200_000])
def test_noise_is_standard_gumbel_and_differs_by_seed_and_position(vocab):
    draws = 200_000 // vocab
    noise = np.concatenate([gumbel(3, position, vocab) for position in range(draws)]).astype(np.float64)
    assert np.isfinite(noise).all()
    assert abs(noise.mean() - 0.57722) < 0.015
    assert abs(noise.var() - math.pi**2 / 6) < 0.04
    others = [gumbel(3, 9999, vocab), gumbel(4, 0, vocab), gumbel(4, 3, vocab)]
    assert all(abs(np.corrcoef(noise[:1000], other[:1000])[0, 1]) < 0.15 for other in others)


def test_tokens_of_a_race_are_independent():
    """One number tells the largest noise of all; still any two are uncorrelated, and each may be it."""
    vocab, positions = 8200, 400
    races = Noise(0, 0, vocab).races
    rows = np.stack([Noise(5, position, vocab).all for position in range(positions)])
    whole, count = rows[:, : 31 * races].reshape(positions, 31, races), positions * races
    shares = np.exp(-np.exp(-whole.astype(np.float64)))  # uniform, if the noise is Gumbel's
    pairs = np.einsum("pir,pjr->ij", shares - 0.5, shares - 0.5) / (count / 12)
    assert abs(np.diag(pairs) - 1).max() < 0.02
    assert abs(pairs - np.diag(np.diag(pairs))).max() < 5 / math.sqrt(count)
    winners = np.bincount(whole.argmax(axis=1).reshape(-1), minlength=31) / count
    assert abs(winners * 31 - 1).max() < 5 * math.sqrt(31 / count)


@pytest.mark.parametrize("vocab", [1, 61, 8192, *LARGE])
def test_races_hold_each_token_once(vocab):
    noise, values = Noise(0, 0, vocab), np.random.default_rng(1).normal(0, 1, vocab).astype(np.float32)
    races = [noise.tokens_of(np.array([race])) for race in range(noise.races)]
    assert np.array_equal(np.sort(np.concatenate(races)), np.arange(vocab))
    best = [max(values[race], default=-np.inf) for race in races]
    assert noise.best_of(values).tolist() == best
    values[vocab // 2] = np.nan
    assert np.isnan(noise.best_of(values)).sum() == 1


@pytest.mark.parametrize("vocab", [5000, 300_000])
def test_bounds_are_near_the_largest_noise_and_never_below(vocab):
    near = 0
    for position in range(20):
        noise = Noise(3, position, vocab)
        largest, bounds = noise.best_of(noise.all).astype(np.float64), noise.bounds.astype(np.float64)
        assert (bounds >= largest - 1e-4)[np.isfinite(largest)].all()
        large = largest > math.log(32) + 2
        near += np.count_nonzero(large)
        assert (bounds - largest)[large].max(initial=0) < 0.15
    assert near > 100


@pytest.mark.parametrize("bits", [27, 32])
def test_the_largest_and_the_least_word_have_finite_times(bits):
    expected = [2.0 ** -(bits + 1), (bits + 1) * math.log(2)]
    np.testing.assert_allclose(exponential(np.array([0, 2**bits - 1]), bits), expected, rtol=1e-6)
