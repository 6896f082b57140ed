"""A teacher gives a target's likeliest tokens and hidden states, and a course remembers the former."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specbuild.builder.distill.data import Corpus
from specbuild.builder.distill.teacher import LIKELIEST, Course, Teacher
from specbuild.builder.distill.work import Work


def nothing(*_: object) -> None: ...


@pytest.fixture
def corpus() -> Corpus:
    rows = np.random.default_rng(1).integers(0, 97, (5, 8)).astype(np.int32)
    return Corpus(rows, rows, 1, np.array([8]))


@torch.no_grad()
def test_the_likeliest_tokens_and_their_probabilities(make_model: Callable[..., Any]) -> None:
    """64 of the 97 tokens, as many as are remembered, and no probability among them is scaled up to make 1."""
    model, tokens = make_model(), torch.arange(12).reshape(2, 6)
    lesson = Teacher(model)(tokens)
    dense = model(tokens).logits.softmax(-1)
    assert lesson.ids.shape == lesson.probs.shape == (2, 6, LIKELIEST)
    torch.testing.assert_close(lesson.probs, dense.gather(-1, lesson.ids))
    least, rest = lesson.probs.min(-1).values, dense.scatter(-1, lesson.ids, 0.0)
    assert (rest.max(-1).values <= least).all()
    torch.testing.assert_close(lesson.probs.sum(-1) + rest.sum(-1), torch.ones(2, 6))
    assert (rest.sum(-1) > 1e-6).all()


@torch.no_grad()
def test_taps_are_the_inputs_of_layers_side_by_side(make_model: Callable[..., Any]) -> None:
    model, tokens = make_model(), torch.arange(18).reshape(2, 9)
    hidden = model(tokens, output_hidden_states=True).hidden_states
    teacher = Teacher(model, (0, 1))
    taps = teacher(tokens).taps
    assert taps is not None
    torch.testing.assert_close(taps, torch.cat([hidden[0], hidden[1]], -1))
    alone = teacher.states(tokens)  # of the layers alone, without the head
    assert alone is not None
    torch.testing.assert_close(alone, taps)
    assert Teacher(model)(tokens).taps is None
    assert Teacher(model).states(tokens) is None


def test_what_the_target_says_is_remembered(make_model: Callable[..., Any], tmp_path: Path, corpus: Corpus) -> None:
    """Of rows that lie in an unfinished training's folder another target says what the first one said."""
    teacher, work, told = Teacher(make_model()), Work.open(tmp_path / "w", {}, False, False), list[str]()
    course = Course.of(teacher, corpus, work, 2, lambda what, *_: told.append(what))
    first, live = course.lesson(np.array([3, 1])), Course(teacher, corpus.rows).lesson(np.array([3, 1]))
    assert torch.equal(first.tokens, live.tokens)
    dense = [torch.zeros(2, 8, 97).scatter(-1, each.ids, each.probs) for each in (first, live)]
    torch.testing.assert_close(*dense, atol=1e-3, rtol=1e-2)
    other = Teacher(make_model(num_hidden_layers=1))
    later = Course.of(other, corpus, work, 5, lambda what, *_: told.append(what)).lesson(np.array([3, 1]))
    assert torch.equal(first.ids, later.ids)
    assert torch.equal(first.probs, later.probs)
    assert set(told) == {"the target reads"}


def test_what_would_take_too_much_room_is_asked_anew(
    make_model: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpus: Corpus
) -> None:
    monkeypatch.setattr("specbuild.builder.distill.teacher.MAX_RECORDED", 0)
    work = Work.open(tmp_path / "w", {}, False, False)
    course = Course.of(Teacher(make_model(), (1,)), corpus, work, 2, nothing)
    assert not list(work.folder.glob("*.safetensors"))
    taps = course.lesson(np.array([2])).taps
    assert taps is not None
    assert taps.shape == (1, 8, 32)
