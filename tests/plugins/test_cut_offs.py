"""Top-k, top-p and min-p on the host: exactly the tokens that the sampler leaves."""

import ctypes

import numpy as np
import pytest
from choosing import rows, simple

from specbuild.runtime.sampling.sampler import SamplingParams


@pytest.mark.slow(but=("host-0.003",))
@pytest.mark.parametrize("top_p", [1e-4, 0.003, 0.999])
def test_top_p_of_a_long_row(kernels, top_p):
    """The mass of thousands of tokens that weigh about the same."""
    logits = np.random.default_rng(10).normal(0, 0.3, (1, 4, 20_001)).astype(np.float32)
    choices, _ = simple(kernels, logits, SamplingParams(temperature=1.0, top_p=top_p), 64)
    for row, got in zip(logits[0], choices[0], strict=True):
        order = np.argsort(-row)
        weights = np.exp(row[order].astype(np.float64))
        inside = int(((np.cumsum(weights) - weights) / weights.sum() < top_p).sum())
        assert (got >= 0).sum() == min(64, inside)
        assert set(got.tolist()) - {-1} <= set(order[:inside].tolist())


@pytest.mark.parametrize(
    ("params", "left"),
    [
        ({"top_k": 2}, 3),
        ({"top_k": 5}, 5003),
        ({"top_k": 3000}, 5003),
        ({"top_k": 5004}, 10_003),
        ({"top_p": 0.3}, 5003),
        ({"top_p": 0.9}, 10_003),
        ({"top_k": 5, "top_p": 0.9}, 5003),
    ],
)
def test_more_equal_logits_than_a_block_keeps(kernels, params, left):
    """Three high, 5,000 equal, 5,000 a little lower; noise far larger than what they differ by tells who was left."""
    logits = np.repeat(np.array([9, 2, 1.9], np.float32), [3, 5000, 5000])
    order = np.random.default_rng(12).permutation(len(logits))
    shuffled = np.empty((1, 1, len(logits)), np.float32)
    shuffled[0, 0, order] = logits
    choices, _ = simple(kernels, shuffled, SamplingParams(temperature=50.0, **params), 64)
    assert set(choices[0, 0].tolist()) - {-1} <= set(order[:left].tolist())
    if left > 5003:
        assert set(choices[0, 0].tolist()) & set(order[5003:].tolist())


def test_noise_is_drawn_for_who_is_left_alone(host_kernels):
    """Eight neighbours share a block of Philox, which is 20 products; −∞ is nobody's noise either."""
    logits = np.random.default_rng(11).normal(0, 4, (1, 1, 5001)).astype(np.float32)
    logits[0, 0, 4096:] = -np.inf  # a slice of its own, but for eight
    logits[0, 0, 4500] = 100
    products = ctypes.CDLL(str(host_kernels.library.path)).specbuild_host_products
    products.restype = ctypes.c_uint64

    def drawn(**params):
        products()
        simple(host_kernels, logits, SamplingParams(**params), 1)
        count, rest = divmod(int(products()), 20)
        assert rest == 0
        return count

    assert drawn(temperature=0.0, top_k=5) == 0
    assert drawn(temperature=1.0) == 512 + 1
    for top_k in (1, 5, 40):
        best = np.argsort(-logits[0, 0])[:top_k]
        assert drawn(temperature=1.0, top_k=top_k) == len({token // 8 for token in best.tolist()})


def test_neighbours_are_told_apart(kernels):
    """Logits that differ in their last bit, on both sides of every number of bits a pass looks at."""
    for bits in (0x40000000, 0x3FC00000, 0x3F800800, 0x3F800801, 0xBF800800, 0x00000001, 0x80000001):
        value = np.array([bits], dtype=np.uint32).view(np.float32)
        low, high = np.nextafter(value, np.float32(-9)), np.nextafter(value, np.float32(9))
        logits = rows([low[0], value[0], high[0]])
        for top_k in (1, 2):
            choices, _ = simple(kernels, logits, SamplingParams(temperature=1.0, top_k=top_k), 3)
            assert set(choices[0, 0].tolist()) - {-1} == set(range(3 - top_k, 3))
