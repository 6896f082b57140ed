"""KL divergence between the next-token distributions of two models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.sampling.logprobs import log_softmax

AT_ONCE = 1 << 20  # numbers converted to float64 at once: with a large vocabulary, all rows would take gigabytes


def divergences(
    references: Sequence[NDArray[np.float32]], logits: Sequence[NDArray[np.float32]]
) -> NDArray[np.float64]:
    """Return `kl` of every row of several texts' logits, concatenated: a list of `[T, V]` twice to `float64[ΣT]`."""
    return np.concatenate([kl(exact, each) for exact, each in zip(references, logits, strict=True)])


def kl(reference: NDArray[np.float32], logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return KL(softmax(reference) ‖ softmax(logits)) of each row, in nats: `[T, V]` twice to `float64[T]`."""
    return by_rows(_kl, reference, logits)


def by_rows(function: Callable[..., NDArray[Any]], *arrays: NDArray[Any]) -> NDArray[Any]:
    """Apply `function`, which maps arrays `[rows, V]` to `[rows]`, to arrays `[T, V]` a few rows at a time."""
    step = max(1, AT_ONCE // arrays[0].shape[1])
    starts = range(0, max(1, len(arrays[0])), step)
    return np.concatenate([function(*(each[at : at + step] for each in arrays)) for at in starts])


def _kl(reference: NDArray[np.float32], logits: NDArray[np.float32]) -> NDArray[np.float64]:
    p, q = log_softmax(reference), log_softmax(logits)
    with np.errstate(invalid="ignore"):  # −inf − −inf where both models rule a token out
        return np.asarray(np.where(np.isneginf(p), 0.0, np.exp(p) * (p - q)).sum(axis=1))
