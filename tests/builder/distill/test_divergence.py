"""Divergences of the target's likeliest tokens against formulas over whole vocabularies."""

from __future__ import annotations

import pytest
import torch

from specbuild.builder.distill.divergence import DIVERGENCES, log_probabilities

torch.manual_seed(0)
P, Q = torch.randn(2, 5, 12).mul(2).softmax(-1)
DENSE = {
    "kl": (P * (P / Q).log()).sum(-1),
    "reverse-kl": (Q * (Q / P).log()).sum(-1),
    "tv": (P - Q).abs().sum(-1) / 2,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_and_their_gradient_are_torchs(dtype: torch.dtype) -> None:
    """Of columns that are asked for twice, too."""
    logits, columns = torch.randn(2, 3, 12).mul(3).to(dtype), torch.randint(12, (2, 3, 5))
    columns[..., 1] = columns[..., 0]
    found, expected = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    ours, theirs = log_probabilities(found, columns), expected.float().log_softmax(-1).gather(-1, columns)
    torch.testing.assert_close(ours, theirs)
    weights = torch.randn(2, 3, 5)
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    torch.testing.assert_close(found.grad, expected.grad)


@pytest.mark.parametrize("name", DENSE)
def test_of_all_tokens_it_is_the_dense_one(name: str) -> None:
    order = torch.argsort(P, dim=-1)
    found = DIVERGENCES[name](Q.log().gather(-1, order), P.gather(-1, order), torch.ones_like(P))
    torch.testing.assert_close(found, DENSE[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", DENSE)
def test_a_token_the_draft_has_not_counts_as_what_cannot_be_drafted(name: str) -> None:
    """The draft's vocabulary lacks token 3, and the record holds the likeliest six."""
    known_q = Q.clone()
    known_q[:, 3] = 0
    known_q = known_q / known_q.sum(-1, keepdim=True)
    ids = P.topk(6).indices
    known = (ids != 3).float()
    found = DIVERGENCES[name](known_q.clamp(min=1e-30).log().gather(-1, ids), P.gather(-1, ids), known)
    dense = torch.zeros(5)
    for row in range(5):
        kept = [int(token) for token in ids[row] if token != 3]
        p, q = P[row, kept], known_q[row, kept]
        dense[row] = {
            "kl": (p * (p / q).log()).sum(),
            "reverse-kl": (q * (q / p).log()).sum() + (1 - q.sum()) * ((1 - q.sum()) / (1 - p.sum())).log(),
            "tv": 1 - torch.minimum(p, q).sum(),
        }[name]
    torch.testing.assert_close(found, dense, atol=1e-5, rtol=1e-5)
