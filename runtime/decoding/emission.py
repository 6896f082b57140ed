"""The target's choices, and what becomes of a sequence by them."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.errors import ExecutionError
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.sampling.logprobs import TokenLogprobs


class Emission:
    """Chooses tokens, notes their log-probabilities, and appends them; `eos`: tokens that end a text."""

    def __init__(self, eos: frozenset[int]) -> None:
        self.eos = eos

    def choose(self, sequence: Sequence, row: NDArray[np.float32], position: int) -> int:
        """The target's choice from a verified node's logits `[V]`, to be emitted; raises ExecutionError."""
        token = sequence.sampler.choose(row, position, ())
        self.note(sequence, row, token)
        return token

    def settled(self, sequence: Sequence, row: NDArray[np.float32], position: int, bound: float) -> int | None:
        """As `choose`; None where the choice might be another if each two logits lay up to `bound` farther apart."""
        token = sequence.sampler.choose(row, position, ())
        if not sequence.sampler.settles(row, position, token, bound):
            return None
        self.note(sequence, row, token)
        return token

    def note(self, sequence: Sequence, row: NDArray[np.float32], token: int) -> None:
        """Refuse a choice whose logit is not finite (ExecutionError); note its log-probability if asked."""
        if not math.isfinite(row[token]):
            raise ExecutionError(f"the model gave {row[token]} as a token's logit: build the bundle from sound weights")
        if sequence.params.logprobs is not None:
            sequence.logprobs.append(TokenLogprobs.of(row, token, sequence.params.logprobs))

    def emit(self, sequence: Sequence, token: int, begins: bool = True) -> None:
        """Append a token; see `Sequence.emit`."""
        sequence.emit(token, self.eos, begins)
