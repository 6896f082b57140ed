"""Top-k, top-p and min-p over one node's logits; against a naive reference they are in test_sampler."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.runtime.sampling.cut_offs import CutOffs
from specbuild.runtime.sampling.row import Row

LOGITS = np.log(np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32))


def left(cuts: CutOffs, logits: np.ndarray = LOGITS) -> list[int]:
    kept = range(len(logits)) if cuts.left is None else cuts.left.tolist()
    return [token for token in kept if logits[token] > -np.inf and cuts.in_top_p(float(logits[token]))]


def test_what_has_no_score_has_no_mass() -> None:
    """As if it were not there: the cut-offs are among the others."""
    logits = np.array([-np.inf, 0.3, -np.inf, 0.2, 0.1], dtype=np.float32)
    few = logits[[1, 3, 4]]
    for cut in ((2, 1.0, 0.0), (0, 0.5, 0.0), (0, 1.0, 0.95), (0, 0.7, 0.5)):
        assert left(CutOffs(Row(logits), *cut), logits) == [
            [1, 3, 4][token] for token in left(CutOffs(Row(few), *cut), few)
        ]


def test_slacks_tell_how_far_inside_a_token_is() -> None:
    cuts = CutOffs(Row(LOGITS), 2, 1.0, 0.5)
    inside, outside = cuts.slacks(1), cuts.slacks(2)
    assert inside == pytest.approx([math.log(0.3 / 0.2), math.log(0.3 / 0.2)], abs=1e-5)
    assert outside == pytest.approx([math.log(0.2 / 0.3), 0.0], abs=1e-5)
    assert CutOffs(Row(LOGITS), 0, 1.0, 0.0).slacks(2) == []


@pytest.mark.parametrize(
    ("cut", "token", "moved", "surely"),
    [
        ((2, 1.0, 0.0), 0, 0.2, True),
        ((2, 1.0, 0.0), 1, 0.5, None),  # the third is 0.41 behind
        ((2, 1.0, 0.0), 2, 0.2, False),
        ((0, 1.0, 0.6), 1, 0.2, True),  # the floor is 0.22 below it
        ((0, 1.0, 0.6), 1, 0.25, None),
        ((0, 0.65, 0.0), 1, 0.2, True),
        ((0, 0.65, 0.0), 1, 0.5, None),  # the third may come before it, and both have more than top-p then
        ((0, 0.65, 0.0), 2, 0.1, False),
    ],
)
def test_what_is_sure_whatever_moves(
    cut: tuple[int, float, float], token: int, moved: float, surely: bool | None
) -> None:
    assert CutOffs(Row(LOGITS), *cut).surely(token, moved) is surely


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32),
    cut=st.tuples(st.sampled_from([0, 1, 3, 7]), st.sampled_from([1.0, 0.9, 0.5, 0.2]), st.sampled_from([0, 0.1, 0.5])),
    moved=st.floats(0, 3),
)
def test_nothing_that_is_sure_is_ever_otherwise(seed: int, cut: tuple[int, float, float], moved: float) -> None:
    """Logits that each lie up to half of it elsewhere, at random and at the worst."""
    random = np.random.default_rng(seed)
    logits = random.normal(0, 1.5, 12).astype(np.float32)
    sure = {token: CutOffs(Row(logits), *cut).surely(token, moved) for token in range(12)}
    for token, leaves in sure.items():
        others = [random.uniform(-0.5, 0.5, 12) for _ in range(4)]
        others += [
            np.where(np.arange(12) == token, -sign, sign * (logits > logits[token] - moved)) for sign in (0.5, -0.5)
        ]
        for other in others:
            elsewhere = (logits + 0.999 * moved * other).astype(np.float32)
            assert leaves in (None, token in left(CutOffs(Row(elsewhere), *cut), elsewhere))


@settings(deadline=None)
@given(st.integers(0, 2**32), st.floats(0.01, 1), st.sampled_from([1, 5, 40]), st.booleans())
def test_narrowing_leaves_whatever_top_p_does(seed: int, top_p: float, few: int, ties: bool) -> None:
    """And little else, where it narrows at all."""
    random = np.random.default_rng(seed)
    logits = random.normal(0, random.choice([1, 4]), 600).astype(np.float32)
    if ties:
        logits = np.round(logits)
    cuts = CutOffs(Row(logits), 0, top_p, 0.0)
    wanted = left(cuts, logits)
    cuts.narrow(few)
    assert left(cuts, logits) == wanted
    if cuts.left is not None:
        assert np.isin(logits[cuts.left], logits[wanted]).mean() > 0.4 or len(cuts.left) < 4


def test_narrowing_narrows_where_the_likeliest_have_the_mass() -> None:
    logits = np.zeros(3000, dtype=np.float32)
    logits[[70, 7, 700]] = 20, 19, 18
    cuts = CutOffs(Row(logits), 0, 0.9, 0.0)
    cuts.narrow(8)
    assert cuts.left is not None
    assert cuts.left.tolist() == [7, 70]
