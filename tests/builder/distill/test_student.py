"""Every student class has what training asks of one, and its agreement is what its drafting comes to."""

import numpy as np
import pytest
import torch

from specbuild.builder.distill.parallel import ParallelStudent
from specbuild.builder.distill.student import Lesson
from specbuild.builder.distill.validate import Exam

MASK = 97


def lesson_of(tokens):
    return Lesson(tokens, torch.zeros(*tokens.shape, 1, dtype=torch.int64), torch.ones(*tokens.shape, 1))


@torch.no_grad()
def drafted(student, text, depth):
    """Greedy drafting as a runtime does it, one pass over the whole text a token, or one with masks."""
    if isinstance(student, ParallelStudent):
        ids = torch.tensor([[*text, *[MASK] * (depth - 1)]])
        return [int(t) for t in student.tokens[student.net(input_ids=ids).logits[0, len(text) - 1 :].argmax(-1)]]
    found = list[int]()
    for _ in range(depth):
        logits = student.net(input_ids=torch.tensor([[*text, *found]])).logits[0, -1]
        found.append(int(student.tokens[logits.argmax()]))
    return found


@pytest.mark.parametrize("kind", ["chain", "parallel"])
@torch.no_grad()
def test_agreement_is_drafting_token_by_token(kind, request):
    student, depth = request.getfixturevalue(kind), 3
    text = [1, 2]
    for turn in range(5):  # partly what it would draft itself, partly not
        text += [*drafted(student, text, 2 + turn % 2), 5 + turn]
    found = student.agreement(lesson_of(torch.tensor([text])), depth)[0]
    assert found.shape == (len(text), depth)
    accepted = found.int().cumprod(1).sum(1).tolist()
    for root in range(len(text)):
        after = text[root + 1 : root + 1 + depth]
        chain = drafted(student, text[: root + 1], depth)[: len(after)]
        same = next((n for n, (a, b) in enumerate(zip(chain, after, strict=True)) if a != b), len(after))
        assert accepted[root] == same, root
    assert {0, 2, 3} <= set(accepted)
    rounds, at = list[int](), 2
    while at + depth < len(text):
        rounds.append(accepted[at] + 1)
        at += rounds[-1]
    exam = Exam([lesson_of(torch.tensor([text]))], 2, np.array([len(text)]))
    assert exam.acceptance_length(student, depth) == sum(rounds) / len(rounds)
    assert Exam(exam.lessons, 2, np.array([4])).acceptance_length(student, depth) == 1.0  # an EOS ends the text there
