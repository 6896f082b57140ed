"""Processed logits, of which no more is computed than somebody looks at."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.runtime.sampling.row import Row


def made(seed: int, size: int) -> Any:
    random = np.random.default_rng(seed)
    raw = random.normal(0, random.choice([1e-37, 0.1, 5, 1e37]), size).astype(np.float32)
    if random.integers(2) and abs(raw).max() < 1e30:
        raw = np.round(raw, 1)
    raw[random.random(size) < random.choice([0, 0.5])] = -np.inf
    return raw


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2**32), st.sampled_from([1, 5, 64, 1000]), st.sampled_from([0.01, 0.7, 1.0, 1.3, 100.0]))
def test_a_row_is_its_logits_divided_by_the_temperature(seed: int, size: int, temperature: float) -> None:
    raw = made(seed, size)
    row, before = Row(raw, temperature), raw.copy()
    with np.errstate(over="ignore"):
        processed = raw / np.float32(temperature)
        tokens = np.arange(0, size, 3)
        assert np.array_equal(row.of(tokens), processed[tokens])
        assert np.array_equal(row.all(), processed)
        assert row.largest == processed.max() == row.value(row.best)
        for least in [*processed[::7].tolist(), -math.inf, 0.0]:
            if least < math.inf:
                mask = row.reaching(least)
                assert mask[(processed >= least) & (processed > -np.inf)].all()
                assert not mask[processed < least - abs(least) * 2**-20 - 1e-34].any()
    assert np.array_equal(raw, before)


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2**32), st.sampled_from([1, 64, 1000, 5003]), st.integers(1, 200))
def test_the_head_has_the_likeliest_and_their_equals(seed: int, size: int, count: int) -> None:
    raw = made(seed, size)
    with np.errstate(over="ignore"):
        head, values = Row(raw, 1.7).head(count), raw / np.float32(1.7)
        wanted = np.sort(values)[max(size - count, 0)]
    assert np.array_equal(head, np.unique(head))
    assert set(np.flatnonzero((values >= wanted) & (values > -np.inf))) <= set(head.tolist())


@pytest.mark.parametrize("count", [1, 4, 50, 400])
def test_the_head_of_many_is_short(count: int) -> None:
    raw = np.random.default_rng(count).normal(size=49_152).astype(np.float32)
    assert count <= Row(raw, 0.8).head(count).size <= 2 * count + 8
