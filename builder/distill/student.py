"""The interface between the training loop and the kinds of drafts: what a student is shown and what it must do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from .divergence import Divergence


@dataclass(frozen=True)
class Lesson:
    """Texts, and what the target predicts for them.

    Attributes:
        tokens: `int64[B, T]`.
        ids: `int64[B, T, k]`, the target's k likeliest next tokens after each token.
        probs: `float32[B, T, k]`, their probabilities, which sum to at most 1.
        taps: `[B, T, n·H]`, the concatenated hidden states of n of the target's layers; None without taps.
    """

    tokens: Tensor
    ids: Tensor
    probs: Tensor
    taps: Tensor | None = None


class Student(Protocol):
    """A draft in training."""

    tokens: Tensor  # `int64[columns]`, the target's token of each column of its logits
    taps: tuple[int, ...]  # the target's layers whose inputs it reads (HF's `hidden_states[i]`); () for none

    @property
    def net(self) -> nn.Module:
        """The module that is trained."""
        ...

    def to(self, device: torch.device) -> None:
        """Move the module and all other tensors to a device."""
        ...

    def loss(self, lesson: Lesson, divergence: Divergence) -> Tensor:
        """Return the scalar to minimise: the mean divergence over all positions and depths that are trained."""
        ...

    def agreement(self, lesson: Lesson, depth: int) -> Tensor:
        """Return where greedy drafting agrees with the text: `bool[B, T, depth]`.

        Entry [b, t, d] is for a root at token t whose first d drafted tokens are the text's: it is true if the next
        drafted token equals token t + 1 + d. It is false past the end of the text.
        """
        ...

    def progress(self, done: float) -> None:
        """Tell the student which fraction of the training is done, from 0 to 1."""
        ...

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors."""
        ...
