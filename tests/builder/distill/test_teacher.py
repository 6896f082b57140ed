"""A teacher gives a target's likeliest tokens and hidden states, and a course remembers the former."""

import numpy as np
import pytest
import torch

from specbuild.builder.distill.data import Corpus
from specbuild.builder.distill.teacher import Course, Teacher
from specbuild.builder.distill.work import Work


def nothing(*_): ...


@pytest.fixture
def corpus():
    rows = np.random.default_rng(1).integers(0, 97, (5, 8)).astype(np.int32)
    return Corpus(rows, rows, 1, np.array([8]))


@torch.no_grad()
def test_the_likeliest_tokens_and_their_probabilities(make_model):
    """The 64 likeliest of 97 tokens are remembered, and no probability among them is scaled up to make 1."""
    model, tokens = make_model(), torch.arange(12).reshape(2, 6)
    lesson, dense = Teacher(model)(tokens), model(tokens).logits.softmax(-1)
    torch.testing.assert_close(lesson.probs, dense.gather(-1, lesson.ids))
    torch.testing.assert_close(lesson.probs.sort(descending=True).values, dense.topk(64).values)


def test_what_the_target_says_is_remembered(make_model, tmp_path, corpus):
    """Of rows that lie in an unfinished training's folder another target says what the first one said."""
    teacher, work, rows = Teacher(make_model()), Work.open(tmp_path / "w", {}, False, False), np.array([3, 1])
    first = Course.of(teacher, corpus, work, 2, nothing).lesson(rows)
    live = Course(teacher, corpus.rows).lesson(rows)
    assert torch.equal(first.tokens, live.tokens)
    dense = [torch.zeros(2, 8, 97).scatter(-1, each.ids, each.probs) for each in (first, live)]
    torch.testing.assert_close(*dense, atol=1e-3, rtol=1e-2)
    later = Course.of(Teacher(make_model(num_hidden_layers=1)), corpus, work, 5, nothing).lesson(rows)
    assert torch.equal(first.ids, later.ids)
    assert torch.equal(first.probs, later.probs)


def test_what_would_take_too_much_room_is_asked_anew(make_model, tmp_path):
    rows = np.broadcast_to(np.int32(5), (1 << 21, 8))
    work = Work.open(tmp_path / "w", {}, False, False)
    course = Course.of(Teacher(make_model(), (1,)), Corpus(rows, rows, 1, np.array([8])), work, 2, nothing)
    assert not list(work.folder.glob("*.safetensors"))
    assert course.lesson(np.array([2])).taps is not None
