"""Log-probabilities of emitted tokens: the log-softmax of the model's logits before any logit processor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.errors import ExecutionError

LOWEST = -9999.0  # stands for −∞ in JSON


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The natural log-probabilities at one emitted token's position.

    Attributes:
        token_id: The emitted token.
        logprob: Its log-probability.
        top: The best tokens at the position as (token id, log-probability), best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, logits: NDArray[np.float32], token: int, count: int) -> TokenLogprobs:
        """Compute log-probabilities, in float64.

        Args:
            logits: The row `float32[V]` that the token was chosen from.
            token: The emitted token.
            count: How many of the best tokens to report; among equals the lowest id comes first.

        Raises:
            ExecutionError: The token's logit is NaN or infinite.
        """
        row = log_softmax(logits)
        if not math.isfinite(row[token]):
            raise ExecutionError("the model gave NaN or infinity for a logit: build the bundle from sound weights")
        best: list[int] = []
        if count:
            count = min(count, row.size)
            likely = np.flatnonzero(row >= np.partition(row, -count)[-count])
            best = likely[np.argsort(-row[likely], kind="stable")[:count]].tolist()
        return cls(token, float(row[token]), tuple((each, float(row[each])) for each in best))

    def to_dict(self) -> dict[str, Any]:
        """Return the object in a result's `logprobs`; as in vLLM, values end at LOWEST, for JSON has no infinity."""
        top = [{"token_id": token, "logprob": max(logprob, LOWEST)} for token, logprob in self.top]
        return {"token_id": self.token_id, "logprob": max(self.logprob, LOWEST), "top": top}


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the natural logarithm of the softmax over the last axis, in float64."""
    rows = logits.astype(np.float64)
    rows -= rows.max(axis=-1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=-1, keepdims=True))
    return rows
