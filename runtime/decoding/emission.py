"""Emission: chooses tokens from the target's logits and records them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.errors import ExecutionError
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.sampling.logprobs import TokenLogprobs


class Emission:
    """Chooses tokens and records their log-probabilities; `eos`: token ids that end a text."""

    def __init__(self, eos: frozenset[int]) -> None:
        self.eos = eos

    def choose(self, sequence: Sequence, row: NDArray[np.float32], position: int) -> int:
        """Return the target's choice at a verified node with logits `[V]`, and record it; raises ExecutionError."""
        token = sequence.sampler.choose(row, position, ())
        self.note(sequence, row, token)
        return token

    def emit(self, sequence: Sequence, choices: Iterable[tuple[int, int]]) -> list[int]:
        """Emit a path's nodes' choices until the text ends; return the nodes whose choices were emitted."""
        path = list[int]()
        for node, token in choices:
            sequence.emit(token, self.eos, begins=not path)
            path.append(node)
            if sequence.finish_reason:
                break
        return path

    def note(self, sequence: Sequence, row: NDArray[np.float32], token: int) -> None:
        """Record the log-probability of a choice if asked to; raise ExecutionError if its logit is not finite."""
        if not math.isfinite(row[token]):
            raise ExecutionError(f"the model gave {row[token]} as a token's logit: build the bundle from sound weights")
        if sequence.params.logprobs is not None:
            sequence.logprobs.append(TokenLogprobs.of(row, token, sequence.params.logprobs))
