"""How far a draft is from the target: forward and reverse Kullback-Leibler divergence, and total variation.

DistillSpec (arXiv 2310.08461) compares them; 1 − total variation is the chance that a sampled draft is accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LEAST = 1e-9  # of probabilities that logarithms are taken of
Divergence = Callable[[Tensor, Tensor, Tensor], Tensor]


class _LogProbabilities(torch.autograd.Function):
    """A text at a time, so that a CPU's caches hold what is computed, and nothing of the whole vocabulary is kept."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, columns: Tensor) -> Tensor:
        totals = torch.stack([text.float().logsumexp(-1, keepdim=True) for text in logits])
        ctx.save_for_backward(logits, columns, totals)
        return logits.gather(-1, columns).float() - totals

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, columns, totals = ctx.saved_tensors
        found = torch.empty_like(logits)
        for out, text, asked, total, given in zip(found, logits, columns, totals, grad, strict=True):
            moved = text.float().sub_(total).exp_().mul_(-given.sum(-1, keepdim=True))
            out.copy_(moved.scatter_add_(-1, asked, given))
        return found, None


def log_probabilities(logits: Tensor, columns: Tensor) -> Tensor:
    """`[B, N, n]`, `int64[B, N, k]` → `float32[B, N, k]`: the logarithms of these columns' probabilities."""
    found: Tensor = _LogProbabilities.apply(logits, columns)  # type: ignore[no-untyped-call]
    return found


def forward_kl(log_q: Tensor, probs: Tensor, known: Tensor) -> Tensor:
    """Σ p log(p / q) over what the target finds likely. See DIVERGENCES for the arguments of all three."""
    p = probs * known
    return (p * (p.clamp(min=LEAST).log() - log_q)).sum(-1)


def reverse_kl(log_q: Tensor, probs: Tensor, known: Tensor) -> Tensor:
    """Σ q log(q / p), all that is not among the target's likeliest taken together."""
    q = log_q.exp() * known
    rest_q = (1 - q.sum(-1)).clamp(min=LEAST)
    rest_p = (1 - (probs * known).sum(-1)).clamp(min=LEAST)
    inner = (q * (log_q - probs.clamp(min=LEAST).log())).sum(-1)
    return inner + rest_q * (rest_q.log() - rest_p.log())


def total_variation(log_q: Tensor, probs: Tensor, known: Tensor) -> Tensor:
    """1 − Σ min(p, q): how often a sample of the draft's would be rejected."""
    return 1 - (torch.minimum(probs, log_q.exp()) * known).sum(-1)


# (log_q, probs, known) → `[...]`: the draft's log-probabilities of the target's k likeliest tokens `[..., k]`, the
# target's probabilities of them, and 1 where the draft has the token in its vocabulary, else 0.
DIVERGENCES: dict[str, Divergence] = {"kl": forward_kl, "reverse-kl": reverse_kl, "tv": total_variation}
