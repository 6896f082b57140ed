"""The kernel's noise: the runtime's, float64's within a bound."""

from __future__ import annotations

import numpy as np
import oracles
import pytest
from calls import noise
from device import HostKernels

from specbuild.runtime.errors import OptionError
from specbuild.runtime.sampling.noise import SMALL, Noise

NOISE_BOUND = 5e-6  # of g in float32, anywhere


def test_the_oracles_words_are_numpys() -> None:
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 2**64, (300, 2), dtype=np.uint64)
    keys[:4] = [[0, 0], [2**64 - 1, 2**64 - 1], [0, 2**64 - 1], [1, 0]]
    words = np.concatenate([oracles.philox(keys[:, 0], keys[:, 1], block) for block in range(5)], axis=1)
    expected = [np.random.Philox(key=key).random_raw(20).view("<u4") for key in keys]
    assert np.array_equal(words, expected)


def test_noise_of_a_hundred_thousand_rows(kernels: HostKernels) -> None:
    rng = np.random.default_rng(1)
    seeds, positions = rng.integers(0, 2**64, (2, 10**5), dtype=np.uint64)
    positions[: 10**4] = np.arange(10**4)
    values = noise(kernels, seeds, positions, 8)
    error = np.abs(values - oracles.gumbel(oracles.philox(seeds, positions, 0))).max()
    assert error <= NOISE_BOUND, error
    assert np.isfinite(values).all()


@pytest.mark.parametrize("vocab", [1, 13, SMALL, SMALL + 1, 49_152, 300_007])
def test_rows_as_long_as_a_vocabulary(kernels: HostKernels, vocab: int) -> None:
    seeds, positions = np.array([[0, 5, 2**64 - 1], [0, 77, 4096]], dtype=np.uint64)
    for row, seed, position in zip(noise(kernels, seeds, positions, vocab), seeds, positions, strict=True):
        assert np.abs(row - Noise(int(seed), int(position), vocab).all).max() <= NOISE_BOUND


@pytest.mark.parametrize(("rows", "vocab"), [(0, 4), (1, 0)])
def test_noise_is_refused(kernels: HostKernels, rows: int, vocab: int) -> None:
    with pytest.raises(OptionError, match=f"noise of {rows} rows of {vocab} tokens"):
        noise(kernels, *np.zeros((2, rows), dtype=np.uint64), vocab)
