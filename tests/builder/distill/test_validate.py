"""An exam walks the rounds of a draft's greedy chains, and counts those that are whole."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specbuild.builder.distill.chain import ChainStudent
from specbuild.builder.distill.data import Corpus
from specbuild.builder.distill.generate import write
from specbuild.builder.distill.student import Lesson
from specbuild.builder.distill.teacher import Teacher
from specbuild.builder.distill.validate import Exam

LENGTH, DEPTH = 12, 3
NO_LESSON = Lesson(*torch.zeros(3, 1, 1))


def agreeing(*runs: list[int]) -> Any:
    """A student of which at each root so many drafted tokens in a row are right; what comes after them is, too."""
    right = torch.ones(len(runs), LENGTH, DEPTH, dtype=torch.bool)
    for row, run in enumerate(runs):
        for place, count in enumerate(run):
            right[row, place, count : count + 1] = False
    return SimpleNamespace(net=torch.nn.Linear(1, 1), agreement=lambda lesson, depth: right)


@pytest.mark.parametrize(
    ("right", "start", "end", "length"),
    [
        # roots at 2, 3, 5, 7, 8: the next round's root is what the target adds to what was accepted
        ([9, 9, 0, 1, 9, 1, 9, 0, 3, 9, 9, 9], 2, 12, (1 + 2 + 2 + 1 + 4) / 5),
        ([3] * 12, 0, 12, 4.0),
        ([0] * 12, 0, 12, 1.0),
        ([3] * 12, 0, 4, 4.0),  # room for one whole chain
        ([3] * 12, 0, 3, 1.0),  # and for none: 1 by definition
        ([3] * 4 + [0] * 8, 0, 8, (4 + 1) / 2),  # a chain that would reach past the end is no round
    ],
)
def test_rounds_go_on_where_the_last_one_ended(right: list[int], start: int, end: int, length: float) -> None:
    assert Exam([NO_LESSON], start, np.array([end])).acceptance_length(agreeing(right), DEPTH) == pytest.approx(length)


def test_a_draft_that_is_the_target_is_always_right(make_model: Callable[..., Any]) -> None:
    """Of what the target wrote greedily; judged in parts as in one, and the training goes on as it was."""
    model = make_model()
    exam = np.array(write(model, [[5, 17, 3], [61, 4, 4], [7, 7, 9]], 15, [0] * 3, [], 0, 0), dtype=np.int32)
    corpus = Corpus(exam, exam, 3, np.array([15, 15, 4]))
    found = Exam.of(corpus, Teacher(model), 2)
    assert ([len(lesson.tokens) for lesson in found.lessons], found.start) == ([2, 1], 3)
    assert found.ends is corpus.ends
    student = ChainStudent(make_model(attention_dropout=0.5), None)
    for training in (True, False):
        student.net.train(training)
        assert found.acceptance_length(student, DEPTH) == DEPTH + 1
        assert student.net.training is training
    other = ChainStudent(make_model(num_hidden_layers=1), None)
    length = found.acceptance_length(other, DEPTH)
    assert 1 <= length < DEPTH + 1
    assert length == Exam.of(corpus, Teacher(model), 3).acceptance_length(other, DEPTH)
