"""Log-probabilities of emitted tokens: the log-softmax of the model's own logits, before any processor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.errors import ExecutionError

LOWEST = -9999.0  # that JSON says of a token without any probability


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One emitted token's natural log-probability, and the best tokens at its place: (id, logprob), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, logits: NDArray[np.float32], token: int, count: int) -> TokenLogprobs:
        """From the row `float32[V]` the token was chosen from, in float64; the lowest id first among equals."""
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
        """The object in a result's `logprobs`; as in vLLM, none is below LOWEST, for JSON has no infinity."""
        top = [{"token_id": token, "logprob": max(logprob, LOWEST)} for token, logprob in self.top]
        return {"token_id": self.token_id, "logprob": max(self.logprob, LOWEST), "top": top}


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Natural logarithms of the softmax over the last axis, in float64."""
    rows = logits.astype(np.float64)
    rows -= rows.max(axis=-1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=-1, keepdims=True))
    return rows
