"""Training losses between draft and target: forward and reverse Kullback-Leibler divergence, and total variation.

DistillSpec (arXiv 2310.08461) compares them; 1 − total variation is the probability that a sampled draft is accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LEAST = 1e-9  # lower bound of a probability before its logarithm is taken
Divergence = Callable[[Tensor, Tensor, Tensor], Tensor]


class _LogProbabilities(torch.autograd.Function):
    """Log-probabilities of selected columns, with a backward pass of their own.

    One text is processed at a time, so that intermediates fit a CPU's caches; no softmax over the vocabulary is stored.
    """

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
    """Return the log-probabilities `float32[B, N, k]` of `columns` `int64[B, N, k]` under `logits` `[B, N, n]`."""
    found: Tensor = _LogProbabilities.apply(logits, columns)  # type: ignore[no-untyped-call]
    return found


def forward_kl(log_q: Tensor, probs: Tensor, known: Tensor) -> Tensor:
    """Return Σ p log(p / q) over the target's k likeliest tokens. DIVERGENCES explains the arguments."""
    p = probs * known
    return (p * (p.clamp(min=LEAST).log() - log_q)).sum(-1)


def reverse_kl(log_q: Tensor, probs: Tensor, known: Tensor) -> Tensor:
    """Return Σ q log(q / p), with all tokens that are not `known` or not among the target's k likeliest merged."""
    q = log_q.exp() * known
    rest_q = (1 - q.sum(-1)).clamp(min=LEAST)
    rest_p = (1 - (probs * known).sum(-1)).clamp(min=LEAST)
    inner = (q * (log_q - probs.clamp(min=LEAST).log())).sum(-1)
    return inner + rest_q * (rest_q.log() - rest_p.log())


def total_variation(log_q: Tensor, probs: Tensor, known: Tensor) -> Tensor:
    """Return 1 − Σ min(p, q): the probability that a token sampled from the draft is rejected."""
    return 1 - (torch.minimum(probs, log_q.exp()) * known).sum(-1)


# (log_q, probs, known) → `[...]`. All three are `[..., k]`, for the target's k likeliest tokens: the draft's
# log-probabilities, the target's probabilities, and 1 where the draft's vocabulary has the token, else 0.
DIVERGENCES: dict[str, Divergence] = {"kl": forward_kl, "reverse-kl": reverse_kl, "tv": total_variation}
