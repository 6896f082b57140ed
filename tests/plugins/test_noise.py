"""The kernel's noise: the runtime's, within a bound."""

import numpy as np
import pytest
from calls import noise

from specbuild.runtime.sampling.noise import Noise

NOISE_BOUND = 5e-6  # of g in float32, anywhere
LAST = 2**64 - 1


@pytest.mark.parametrize(
    ("vocab", "rows"), [(1, 20), (8, 2000), (13, 20), (8192, 5), (8193, 5), (49_152, 5), (300_007, 4)]
)
def test_noise_is_the_runtimes(kernels, vocab, rows):
    """Of any seed and position, as long as a vocabulary may be."""
    keys = np.random.default_rng(vocab).integers(0, 2**64, (rows, 2), dtype=np.uint64)
    keys[:4] = [[0, 0], [LAST, LAST], [0, LAST], [1, 0]]
    values = noise(kernels, *np.ascontiguousarray(keys.T), vocab)
    assert np.isfinite(values).all()
    for row, (seed, position) in zip(values, keys.tolist(), strict=True):
        assert np.abs(row - Noise(seed, position, vocab).all).max() <= NOISE_BOUND
