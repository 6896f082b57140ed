"""What is learned from: texts of files, texts that a target writes, and the order of rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specbuild.builder.distill import data, texts
from specbuild.builder.distill.data import Corpus
from specbuild.builder.distill.generate import NEVER, SampledThenGreedy, sample, write
from specbuild.builder.distill.teacher import Course, Teacher
from specbuild.builder.distill.work import Work
from specbuild.builder.frontend import checkpoint as checkpoints
from specbuild.runtime.errors import OptionError


def nothing(*_: object) -> None: ...


def test_a_row_is_greedy_after_its_head_and_begins_again_after_eos() -> None:
    rows = torch.tensor([[0, 0, 5, 6], [4, 9, 7, 8], [4, 5, 6, 9], [4, 5, 6, 7]])
    scores = torch.tensor([[0.0] * 10] * 4)
    scores[:, 3] = 1.0
    choice = SampledThenGreedy(torch.tensor([2, 3, 1, NEVER]), torch.tensor([2, 0, 0, 0]), [9], 4)
    found = torch.stack([choice(rows, scores) for _ in range(200)])
    assert [sorted(set(row.tolist())) for row in found.T] == [[3], [*range(10)], [4], [*range(10)]]  # the third ended


def test_tokens_are_drawn_by_their_probability() -> None:
    never = -torch.inf
    scores = torch.tensor([[2.0, never, 0.0, 1.0], [never, never, never, 5.0]], dtype=torch.bfloat16)
    torch.manual_seed(0)
    drawn = torch.stack([sample(scores.repeat(1000, 1)).reshape(1000, 2) for _ in range(20)]).reshape(-1, 2)
    share = torch.bincount(drawn[:, 0], minlength=4) / len(drawn)
    torch.testing.assert_close(share, scores[0].float().softmax(-1), atol=0.01, rtol=0)
    assert (drawn[:, 1] == 3).all()


def test_a_model_writes_by_its_seed_and_padding_changes_nothing(make_model: Callable[..., Any]) -> None:
    model = make_model()
    prompts = [[3, 4, 5, 6], [7]]
    first, again, other = (write(model, prompts, 12, [NEVER] * 2, [0], 0, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert [len(text) for text in first] == [12, 9]
    greedy = write(model, prompts, 12, [0, 0], [], 0, 1)
    for text, prompt in zip(greedy, prompts, strict=True):
        assert text[: len(prompt)] == prompt
        chosen = model(torch.tensor([text])).logits[0].argmax(-1).tolist()
        assert text[len(prompt) :] == chosen[len(prompt) - 1 : -1]


def test_texts_are_of_files_and_folders(asked: Callable[..., Any], target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.md").write_text("alpha", encoding="utf-8")
    (folder / "deep" / "b.jsonl").write_text(json.dumps({"text": "beta"}) + "\n" + json.dumps({"prompt": "gamma"}))
    (folder / ".hidden").write_text("no")
    (folder / "c.bin").write_bytes(b"\xff\xfe\xfd")
    found = checkpoints.find(str(target))
    ids = texts.read([folder], found)
    assert [found.tokenizer.decode(each[:-1]) for each in ids] == ["alpha", "beta", "gamma"]
    assert all(each[-1] == 0 for each in ids)
    for path in (folder / "c.bin", folder / "none", folder / ".hidden" / "x"):
        with pytest.raises(OptionError):
            texts.read([path], found)


def test_a_part_of_the_texts_is_held_out(asked: Callable[..., Any], target: Path, tmp_path: Path) -> None:
    found = checkpoints.find(str(target))
    model = checkpoints.load(found, "sdpa")
    given = [list(range(10 * n + 1, 10 * n + 11)) for n in range(40)]
    config = asked(text=(tmp_path,), generate=None)
    corpus = data.make(config, found, model, given, Work.open(tmp_path / "w", {}, False, False), nothing)
    assert corpus.rows.shape == (15, 24)  # of 375 tokens
    assert (corpus.start, corpus.exam.shape) == (6, (4, 12))
    assert not set(corpus.rows.ravel().tolist()) & set(corpus.exam[:, :6].ravel().tolist())
    both = data.make(asked(text=(tmp_path,)), found, model, given, Work.open(tmp_path / "b", {}, False, False), nothing)
    assert both.rows[:15].tolist() == corpus.rows.tolist()
    begun = {tuple(each[:4]) for each in given}
    written = both.rows.ravel()[375:].tolist()
    assert sum(tuple(written[n : n + 4]) in begun for n in range(len(written))) >= 4
    with pytest.raises(OptionError, match="too few"):
        data.make(config, found, model, given[:4], Work.open(tmp_path / "c", {}, False, False), nothing)


def test_each_epoch_has_each_row_once_in_another_order() -> None:
    corpus = Corpus(np.zeros((10, 4), np.int32), np.zeros((1, 4), np.int32), 1, np.array([4]))
    drawn = np.concatenate([corpus.batch(3, first, 4) for first in range(0, 20, 4)])
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert drawn[:10].tolist() != drawn[10:].tolist()
    assert corpus.batch(4, 0, 10).tolist() != drawn[:10].tolist()


def test_what_is_remembered_of_the_target_is_what_it_says(make_model: Callable[..., Any], tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 97, (5, 8)).astype(np.int32)
    corpus = Corpus(rows, rows, 1, np.array([8]))
    teacher, work = Teacher(make_model()), Work.open(tmp_path / "w", {}, False, False)
    course = Course.of(teacher, corpus, work, 2, nothing)
    kept, live = course.lesson(np.array([4, 1])), Course(teacher, rows).lesson(np.array([4, 1]))
    assert torch.equal(kept.tokens, live.tokens)
    dense = [torch.zeros(2, 8, 97).scatter(-1, each.ids, each.probs) for each in (kept, live)]
    torch.testing.assert_close(*dense, atol=1e-3, rtol=1e-2)
