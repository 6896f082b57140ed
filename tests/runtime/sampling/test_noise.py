"""The noise of one position: which words it is made of, and that no more of it is computed than asked for."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_sampler import gumbel

from specbuild.runtime.sampling.noise import Noise, levels
from specbuild.runtime.sampling.noise import gumbel as gumbel_of


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (1, 2), (2**64 - 1, 1023), (123456789, 7)])
@pytest.mark.parametrize("vocab", [31, 32])
def test_noise_is_half_word_x_of_philox_for_token_x(seed: int, position: int, vocab: int) -> None:
    bits = np.random.Philox(key=np.array([seed, position], dtype=np.uint64))
    words = [half for _ in range(16) for whole in [int(bits.random_raw())] for half in (whole % 2**32, whole >> 32)]
    expected = [-math.log(-math.log1p(-(word + 0.5) / 2**32)) for word in words[:vocab]]
    noise = Noise(seed, position, vocab)
    assert noise.words.tolist() == words[:vocab]
    assert noise.all.dtype == np.float32
    np.testing.assert_allclose(noise.all, expected, rtol=1e-6, atol=1e-6)
    assert np.array_equal(noise.all, gumbel(seed, position, vocab))
    assert np.array_equal(noise.all, gumbel(seed, position, 4 * vocab)[:vocab])


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


def test_all_words_are_made_once_many_are_asked_for() -> None:
    noise, asked = Noise(1, 2, 49_152), np.arange(7, 17)
    few = noise.few
    assert few > 30
    for times in range(1, few // 10 + 1):
        noise.of(asked)
        assert noise.few == few - 10 * times
    noise.of(asked)
    assert noise.few == 0, "all are there"
    assert np.array_equal(noise.of(asked), gumbel(1, 2, 49_152)[asked])


def test_levels_are_logarithms_from_below() -> None:
    edges = [1 << bit for bit in range(32)]
    words = np.array(sorted({0, 2**32 - 1, *edges, *(edge - 1 for edge in edges)}), dtype=np.uint32)
    words = np.concatenate((words, np.random.default_rng(1).integers(0, 2**32, 10_000, dtype=np.uint32)))
    assert levels(words).dtype == np.float32
    found, exact = levels(words) / 2.0**23 - 127, np.log2(np.maximum(words, 1).astype(np.float64))
    assert (found <= exact + 2e-5).all()
    assert (found[words > 0] >= exact[words > 0] - 0.0861).all()
    assert (np.diff(levels(np.sort(words))) >= 0).all()


def test_the_largest_and_the_least_word_have_finite_noise() -> None:
    noise = gumbel_of(np.array([0, 2**32 - 1], dtype=np.uint32))
    np.testing.assert_allclose(noise, [33 * math.log(2), -math.log(33 * math.log(2))], rtol=1e-6)
