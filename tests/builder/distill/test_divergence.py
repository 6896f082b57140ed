"""Divergences of the target's likeliest tokens against formulas over whole vocabularies."""

import pytest
import torch

from specbuild.builder.distill.divergence import DIVERGENCES, log_probabilities

torch.manual_seed(0)
P, Q = torch.randn(2, 5, 12).mul(2).softmax(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_and_their_gradient_are_torchs(dtype):
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


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("likeliest", [6, 12])
def test_a_token_the_draft_has_not_counts_as_what_cannot_be_drafted(name, likeliest):
    """The draft's vocabulary lacks token 3, and the record holds the likeliest six, or all."""
    known_q = Q.clone()
    known_q[:, 3] = 0
    known_q = known_q / known_q.sum(-1, keepdim=True)
    ids = P.topk(likeliest).indices
    found = DIVERGENCES[name](known_q.clamp(min=1e-30).log().gather(-1, ids), P.gather(-1, ids), (ids != 3).float())
    for row, each in enumerate(found):
        kept = [int(token) for token in ids[row] if token != 3]
        p, q = P[row, kept], known_q[row, kept]
        rest_p, rest_q = 1 - p.sum(), (1 - q.sum()).clamp(min=1e-30)
        dense = {
            "kl": (p * (p / q).log()).sum(),
            "reverse-kl": (q * (q / p).log()).sum() + rest_q * (rest_q / rest_p).log(),
            "tv": 1 - torch.minimum(p, q).sum(),
        }[name]
        torch.testing.assert_close(each, dense, atol=1e-5, rtol=1e-5)
