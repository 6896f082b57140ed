"""The noise of one position: which words it is made of, its distribution, and its bounds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from plain_sampler import gumbel

from specbuild.runtime.sampling.noise import SMALL, Noise, exponential, mixed

LARGE = [8193, 9001, 49152]  # the first is no multiple of anything


def words_of(seed: int, position: int, count: int) -> list[int]:
    """The first halves of Philox's words, the lower first."""
    words = np.random.Philox(key=np.array([seed, position], dtype=np.uint64)).random_raw(count // 2).tolist()
    return [half for word in words for half in (word % 2**32, word >> 32)]


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (1, 2), (2**64 - 1, 1023), (123456789, 7)])
@pytest.mark.parametrize("vocab", [31, 32])
def test_noise_is_half_word_x_of_philox_for_token_x(seed: int, position: int, vocab: int) -> None:
    words = words_of(seed, position, 32)
    expected = [-math.log(-math.log1p(-(word + 0.5) / 2**32)) for word in words[:vocab]]
    noise = Noise(seed, position, vocab)
    assert noise.all.dtype == np.float32
    np.testing.assert_allclose(noise.all, expected, rtol=1e-6, atol=1e-6)
    assert np.array_equal(noise.all, gumbel(seed, position, vocab))
    assert np.array_equal(noise.all, gumbel(seed, position, SMALL)[:vocab])


@pytest.mark.parametrize("vocab", LARGE)
def test_a_race_of_a_large_vocabulary_is_won_once_and_earlier_than_all_else(vocab: int) -> None:
    """By the definition, one race after another."""
    noise = Noise(3, 4, vocab)
    races = math.ceil(vocab / 256) * 8
    assert noise.races == races
    words = words_of(3, 4, races + 2)
    key = words[races] | words[races + 1] << 32
    for race in (0, 1, races // 2, races - 1):
        tokens = list(range(race, vocab, races))
        first = -math.log1p(-((words[race] >> 5) + 0.5) / 2**27) / 32
        own = exponential(mixed(key, np.array(tokens)), 32)
        times = [first + (words[race] & 31 != at) * later for at, later in enumerate(own)]
        np.testing.assert_allclose(noise.of(np.array(tokens)), -np.log(times), rtol=1e-6, atol=1e-6)
        if words[race] & 31 < len(tokens):
            assert int(np.argmax(noise.of(np.array(tokens)))) == words[race] & 31
    assert np.array_equal(noise.all, gumbel(3, 4, vocab))


def test_later_words_are_those_of_split_mix() -> None:
    """Vigna's generator; its first words of this seed are well known."""
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert mixed(1234567, np.arange(5)).tolist() == [word >> 32 for word in known]
    assert mixed(2**64 - 1, np.array([0, 2**40])).max() < 2**32


@pytest.mark.parametrize("vocab", [SMALL, 200_000])
def test_noise_is_standard_gumbel_and_differs_by_seed_and_position(vocab: int) -> None:
    draws = 200_000 // vocab
    noise = np.concatenate([gumbel(3, position, vocab) for position in range(draws)]).astype(np.float64)
    assert np.isfinite(noise).all()
    assert abs(noise.mean() - 0.57722) < 0.015
    assert abs(noise.var() - math.pi**2 / 6) < 0.04
    others = [gumbel(3, 9999, vocab), gumbel(4, 0, vocab), gumbel(4, 3, vocab)]
    assert all(abs(np.corrcoef(noise[:1000], other[:1000])[0, 1]) < 0.15 for other in others)


def test_tokens_of_a_race_are_independent() -> None:
    """One number tells the largest noise of all; still any two are uncorrelated, and each may be it."""
    vocab, positions = 8200, 400
    races = Noise(0, 0, vocab).races
    rows = np.stack([Noise(5, position, vocab).all for position in range(positions)])
    whole = rows[:, : 31 * races].reshape(positions, 31, races)
    shares = np.exp(-np.exp(-whole.astype(np.float64)))  # uniform, if the noise is Gumbel's
    pairs = np.einsum("pir,pjr->ij", shares - 0.5, shares - 0.5) / (positions * races / 12)
    assert abs(np.diag(pairs) - 1).max() < 0.02
    assert abs(pairs - np.diag(np.diag(pairs))).max() < 5 / math.sqrt(positions * races)
    winners = np.bincount(whole.argmax(axis=1).reshape(-1), minlength=31) / (positions * races)
    assert abs(winners * 31 - 1).max() < 5 * math.sqrt(31 / (positions * races))
    high = (shares > 0.99).sum(axis=1)  # how many of a race are high at once: a binomial number
    for count in range(3):
        expected = math.comb(31, count) * 0.01**count * 0.99 ** (31 - count)
        assert abs((high == count).mean() - expected) < 5 * math.sqrt(expected / (positions * races))


@pytest.mark.parametrize("vocab", [1, 3, 61, 8192, *LARGE])
def test_races_hold_each_token_once(vocab: int) -> None:
    noise = Noise(0, 0, vocab)
    tokens = noise.tokens_of(np.arange(noise.races))
    assert np.array_equal(np.sort(tokens), np.arange(vocab))
    values = np.random.default_rng(1).normal(0, 1, vocab).astype(np.float32)
    best = noise.best_of(values)
    for race in (0, noise.races // 2, noise.races - 1):
        assert best[race] == max(values[noise.tokens_of(np.array([race]))], default=-np.inf)
    values[vocab // 2] = np.nan
    assert np.isnan(noise.best_of(values)).sum() == 1


def with_halves(vocab: int, halves: Any) -> Noise:
    noise = Noise(0, 0, vocab)
    words = np.random.default_rng(3).integers(0, 2**32, noise.races, dtype=np.uint32)
    words >>= np.arange(noise.races, dtype=np.uint32) % 32
    words[: len(halves)] = halves
    vars(noise)["_halves"] = words
    return noise


@pytest.mark.parametrize("vocab", [5000, 300_000])
def test_bounds_are_near_the_largest_noise_and_never_below(vocab: int) -> None:
    edges = [word for bit in range(32) for word in (2**bit - 1, 2**bit)] + [2**32 - 1]
    noise = with_halves(vocab, edges)
    largest = noise.best_of(noise.all).astype(np.float64)
    bounds = noise.bounds.astype(np.float64)
    real = np.isfinite(largest)
    assert (bounds >= largest - 1e-4)[real].all()
    near = real & (largest > math.log(32) + 2) & (largest < 17)
    assert near.sum() > 1000
    assert (bounds - largest)[near].max() < 0.15


@pytest.mark.parametrize("vocab", [64, 300_000])
def test_the_largest_and_the_least_word_have_finite_noise(vocab: int) -> None:
    noise = with_halves(vocab, [0, 2**32 - 1])
    race = 32 if vocab > SMALL else 1
    first, last = noise.of(np.array([0, 1 + (race - 1) * noise.races]))
    bits = 32 - int(math.log2(race))
    np.testing.assert_allclose(first, (bits + 1) * math.log(2) + math.log(race), rtol=1e-6)
    np.testing.assert_allclose(last, math.log(race) - math.log((bits + 1) * math.log(2)), rtol=1e-6)
