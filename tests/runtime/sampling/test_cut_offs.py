"""Top-k, top-p and min-p over one node's logits; against a naive reference they are in test_sampler."""

from __future__ import annotations

import numpy as np

from specbuild.runtime.sampling.cut_offs import CutOffs
from specbuild.runtime.sampling.row import Row

LOGITS = np.log(np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32))


def test_narrowing_narrows_where_the_likeliest_have_the_mass() -> None:
    logits = np.zeros(3000, dtype=np.float32)
    logits[[70, 7, 700]] = 20, 19, 18
    cuts = CutOffs(Row(logits), 0, 0.9, 0.0)
    cuts.narrow(8)
    assert cuts.left is not None
    assert cuts.left.tolist() == [7, 70]
