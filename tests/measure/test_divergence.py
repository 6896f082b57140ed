"""KL tells how far a model's logits are from others', row by row, also where tokens are impossible or logits huge."""

import numpy as np
import pytest

from specbuild.measure.divergence import divergences, kl


def logits(*rows):
    return np.array(rows, dtype=np.float32)


def test_kl_is_as_it_is_defined_the_reference_first_and_in_nats():
    rng = np.random.default_rng(0)
    a, b = (rng.normal(0, 3, (4, 11)).astype(np.float32) for _ in range(2))
    p, q = (np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(1, keepdims=True) for x in (a, b))
    np.testing.assert_allclose(kl(a, b), (p * np.log(p / q)).sum(1), rtol=1e-6)
    np.testing.assert_allclose(kl(a, a), 0, atol=1e-12)


def test_huge_logits_do_not_overflow():
    with np.errstate(over="raise", divide="raise", invalid="raise"):
        assert kl(logits([3e38, 0.0]), logits([3e38, 0.0])) == pytest.approx([0.0])
        assert kl(logits([1000.0, 0.0]), logits([0.0, 1000.0])) == pytest.approx([1000.0])


def test_an_impossible_token_counts_only_where_the_reference_has_it():
    never = -np.inf
    assert kl(logits([0.0, 0.0, never]), logits([0.0, 0.0, 0.0])) == pytest.approx([np.log(1.5)])
    assert kl(logits([0.0, 0.0, never]), logits([0.0, 0.0, never])).tolist() == [0.0]
    assert kl(logits([0.0, 0.0, 0.0]), logits([0.0, 0.0, never])).tolist() == [np.inf]


@pytest.mark.slow
def test_rows_are_each_as_alone_however_many_and_of_however_many_texts():
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal((9, 1 << 20), dtype=np.float32) for _ in range(2))  # more than are read at once
    alone = [kl(a[[row]], b[[row]])[0] for row in range(9)]
    np.testing.assert_array_equal(divergences([a[:5], a[:0], a[5:]], [b[:5], b[:0], b[5:]]), alone)
    np.testing.assert_array_equal(kl(a, b), alone)
