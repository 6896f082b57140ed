"""The noise on the host: words are NumPy's bit for bit, and g is float64's within a bound."""

from __future__ import annotations

import numpy as np
import oracles
import pytest
from calls import noise
from device import HostKernels

from specbuild.runtime.errors import OptionError

NOISE_BOUND = 5e-6  # of g in float32, anywhere


def test_the_oracles_words_are_numpys() -> None:
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 2**64, (300, 2), dtype=np.uint64)
    keys[:4] = [[0, 0], [2**64 - 1, 2**64 - 1], [0, 2**64 - 1], [1, 0]]
    words = np.concatenate([oracles.philox(keys[:, 0], keys[:, 1], block) for block in range(5)], axis=1)
    expected = [np.random.Philox(key=key).random_raw(20).view("<u4") for key in keys]
    assert np.array_equal(words, expected)


def test_words_of_a_million_rows(kernels: HostKernels) -> None:
    rng = np.random.default_rng(1)
    seeds, positions = rng.integers(0, 2**64, (2, 10**6), dtype=np.uint64)
    positions[: 10**5] = np.arange(10**5)
    words, values = noise(kernels, seeds, positions, 8)
    assert np.array_equal(words, oracles.philox(seeds, positions, 0))
    error = np.abs(values - oracles.gumbel(words)).max()
    assert error <= NOISE_BOUND, error
    assert np.isfinite(values).all()


def test_rows_as_long_as_a_vocabulary(kernels: HostKernels) -> None:
    seeds, positions = np.array([[0, 5, 2**64 - 1], [0, 77, 4096]], dtype=np.uint64)
    words, values = noise(kernels, seeds, positions, 100_000)
    for row, seed, position in zip(words, seeds, positions, strict=True):
        assert np.array_equal(row, np.random.Philox(key=[seed, position]).random_raw(50_000).view("<u4"))
    assert np.abs(values - oracles.gumbel(words)).max() <= NOISE_BOUND


@pytest.mark.parametrize(("rows", "count", "message"), [(0, 4, "0 rows"), (1, 6, "6 words a row"), (1, 0, "0 words")])
def test_noise_is_refused(kernels: HostKernels, rows: int, count: int, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        noise(kernels, *np.zeros((2, rows), dtype=np.uint64), count)
