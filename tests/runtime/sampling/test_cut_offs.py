"""Top-k, top-p and min-p over one node's logits; against a naive reference they are in test_sampler."""

from __future__ import annotations

import numpy as np
import pytest

from specbuild.runtime.sampling.cut_offs import CutOffs
from specbuild.runtime.sampling.row import Row

LOGITS = np.log(np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32))


@pytest.mark.parametrize(
    ("cut", "token", "moved", "surely"),
    [
        ((2, 1.0, 0.0), 1, 0.4, True),
        ((2, 1.0, 0.0), 1, 0.5, None),  # the third is 0.41 behind
        ((2, 1.0, 0.0), 2, 0.2, False),
        ((0, 1.0, 0.6), 1, 0.25, None),  # the floor is 0.22 below it
        ((0, 0.65, 0.0), 1, 0.2, True),
        ((0, 0.65, 0.0), 2, 0.1, False),
    ],
)
def test_what_is_sure_whatever_moves(
    cut: tuple[int, float, float], token: int, moved: float, surely: bool | None
) -> None:
    assert CutOffs(Row(LOGITS), *cut).surely(token, moved) is surely


def test_narrowing_narrows_where_the_likeliest_have_the_mass() -> None:
    logits = np.zeros(3000, dtype=np.float32)
    logits[[70, 7, 700]] = 20, 19, 18
    cuts = CutOffs(Row(logits), 0, 0.9, 0.0)
    cuts.narrow(8)
    assert cuts.left is not None
    assert cuts.left.tolist() == [7, 70]
