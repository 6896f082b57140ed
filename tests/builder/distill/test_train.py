"""The loop follows its schedule, keeps the best weights, stops in time, and goes on from its state alone."""

import sys

import numpy as np
import pytest
import torch

from specbuild.builder.distill.chain import ChainStudent
from specbuild.builder.distill.data import Corpus
from specbuild.builder.distill.generate import write
from specbuild.builder.distill.options import DistillConfig
from specbuild.builder.distill.pipeline import distill
from specbuild.builder.distill.teacher import Course, Teacher
from specbuild.builder.distill.train import Trainer, scalars
from specbuild.builder.distill.validate import Exam
from specbuild.builder.distill.work import Work

FEW = {"steps": 4, "batch_size": 2, "eval_every": 2, "save_every": 2, "depth": 3}


def nothing(*_): ...


@pytest.fixture
def trainer(make_model, tmp_path):
    """`trainer(student, where, progress, scalar, **DistillConfig fields)`: of a few texts that a random model wrote."""
    model = make_model()
    rows = np.array(write(model, [[n, n + 1] for n in range(8)], 26, [3] * 8, [], 0, 0), dtype=np.int32)
    corpus = Corpus(rows, rows[:3], 2, np.full(3, 26))
    teacher = Teacher(model)
    exam = Exam.of(corpus, teacher, 2)

    def make(student, where, progress=nothing, scalar=nothing, **fields):
        config = DistillConfig("t", tmp_path / where, **FEW | fields)
        work = Work.open(config.work, {}, config.work.exists(), False)
        course = Course(teacher, rows)
        return Trainer(config, student, course, corpus, exam, work, torch.float32, progress, scalar)

    return make


def drafts(make_model):
    return ChainStudent(make_model(num_hidden_layers=1, tie_word_embeddings=True), None)


def weights(student):
    return [weight.detach().clone() for weight in student.net.parameters()]


@pytest.mark.slow(only=("fields1",))
@pytest.mark.parametrize("fields", [{"grad_accum": 2}, {"on_policy": 0.5, "steps": 5}])
def test_interrupted_it_goes_on_as_if_it_had_not_been(make_model, trainer, fields):
    """Between two states that were kept: what was done since is done again, and comes to the same."""

    def stop(what, done, *_):
        if done == 3:
            raise KeyboardInterrupt

    whole = trainer(drafts(make_model), "whole", **fields)
    found = whole.run()
    broken = trainer(drafts(make_model), "broken", stop, **fields)
    with pytest.raises(KeyboardInterrupt):
        broken.run()
    broken.work.lock.close()
    later = trainer(drafts(make_model), "broken", **fields)
    again = later.run()
    assert all(torch.equal(a, b) for a, b in zip(weights(whole.student), weights(later.student), strict=True))
    assert (again.step, again.tokens, again.best_step) == (found.step, found.tokens, found.best_step)
    for curve in (found.curve, again.curve):
        assert [point.pop("seconds") >= 0 for point in curve] == [True] * len(curve)
    assert again.curve == found.curve
    assert found.tokens == fields.get("steps", 4) * fields.get("grad_accum", 1) * 2 * 26


def test_it_ends_with_its_best_weights(make_model, trainer):
    """A draft that is the target cannot get better, and steps as wide as these make it worse."""
    student = ChainStudent(make_model(), None)
    before = weights(student)
    found = trainer(student, "d", learning_rate=0.9).run()
    assert (found.curve[0]["acceptance_length"], found.best_step) == (found.best, 0)
    assert found.curve[-1]["acceptance_length"] < found.best == 4.0
    assert all(torch.equal(a, b) for a, b in zip(weights(student), before, strict=True))


def test_without_tensorboard_there_is_no_log(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    scalar, close = scalars(tmp_path / "runs", 0)
    scalar("train/loss", 1.0, 0)
    close()
    assert caplog.messages == ["TensorBoard is not installed, so there is no log: pip install tensorboard"]
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
def test_it_stops_when_it_gets_no_better(asked):
    config = asked(steps=40, eval_every=1, learning_rate=1e-9, patience=3, layers=3, draft_vocab_size=4096)
    report = distill(config)
    assert (report["steps"], report["best_step"], report["acceptance_length"]) == (3, 0, 4.0)
