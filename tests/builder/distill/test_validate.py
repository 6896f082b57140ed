"""An exam walks the rounds of a draft's greedy chains, and counts those that are whole."""

import numpy as np

from specbuild.builder.distill.chain import ChainStudent
from specbuild.builder.distill.data import Corpus
from specbuild.builder.distill.generate import write
from specbuild.builder.distill.teacher import Teacher
from specbuild.builder.distill.validate import Exam

LENGTH, DEPTH = 12, 3


def test_a_draft_that_is_the_target_is_always_right(make_model):
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
