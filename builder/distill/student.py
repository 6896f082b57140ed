"""The seam between training and what is trained: what a student is shown, and what is asked of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from .divergence import Divergence


@dataclass(frozen=True)
class Lesson:
    """Texts, and what the target makes of them.

    tokens: `int64[B, T]`. ids, probs: `int64[B, T, k]`, `float32[B, T, k]`, the target's k likeliest next tokens after
    each token and their probabilities, which sum to less than 1. taps: `[B, T, n·H]`, the hidden states of n of the
    target's layers side by side, for students that ask for them.
    """

    tokens: Tensor
    ids: Tensor
    probs: Tensor
    taps: Tensor | None = None


class Student(Protocol):
    """A draft in training."""

    tokens: Tensor  # `int64[columns]`, the target's tokens that its logits are of
    taps: tuple[int, ...]  # layers of the target whose inputs it reads (HF's `hidden_states[i]`); none: ()

    @property
    def net(self) -> nn.Module:
        """All that is trained."""
        ...

    def to(self, device: torch.device) -> None:
        """Move it."""
        ...

    def loss(self, lesson: Lesson, divergence: Divergence) -> Tensor:
        """A scalar to minimise: the mean over all positions and depths that are drafted from."""
        ...

    def agreement(self, lesson: Lesson, depth: int) -> Tensor:
        """Whether what it would draft greedily is what the text says: `bool[B, T, depth]`.

        At [b, t, d]: drafting from a root at token t, when its first d drafted tokens are the text's, so is the next
        one, token t + 1 + d. False past the end of the text.
        """
        ...

    def progress(self, done: float) -> None:
        """How much of the training is done, from 0 to 1."""
        ...

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors."""
        ...
