"""A corpus is made of given texts and of what a target writes, and gives its rows in another order each epoch."""

import numpy as np
import pytest

from specbuild.builder.distill import data
from specbuild.builder.distill.data import Corpus
from specbuild.builder.distill.work import Work
from specbuild.builder.frontend import checkpoint as checkpoints
from specbuild.runtime.errors import OptionError


def nothing(*_): ...


def test_a_part_of_the_texts_is_held_out(asked, target, tmp_path):
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


def test_each_epoch_has_each_row_once_in_another_order():
    corpus = Corpus(np.zeros((10, 4), np.int32), np.zeros((1, 4), np.int32), 1, np.array([4]))
    drawn = np.concatenate([corpus.batch(3, first, 4) for first in range(0, 20, 4)])
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert len({tuple(each) for each in (drawn[:10], drawn[10:], corpus.batch(4, 0, 10))}) == 3
