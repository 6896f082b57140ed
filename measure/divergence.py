"""How far apart two models' distributions are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.sampling.logprobs import log_softmax


def divergences(
    references: Sequence[NDArray[np.float32]], logits: Sequence[NDArray[np.float32]]
) -> NDArray[np.float64]:
    """`kl` of all rows of several texts' logits, one after another."""
    return np.concatenate([kl(exact, each) for exact, each in zip(references, logits, strict=True)])


def kl(reference: NDArray[np.float32], logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """KL(reference ‖ other) of each row's softmax, in nats: `[T, V]` twice to `float64[T]`."""
    p, q = log_softmax(reference), log_softmax(logits)
    with np.errstate(invalid="ignore"):  # −inf where a token is impossible
        return np.asarray(np.where(np.isneginf(p), 0.0, np.exp(p) * (p - q)).sum(axis=1))
