"""From a target to a draft on disk: check, generate texts, record the target's predictions, train, write."""

from __future__ import annotations

import hashlib
import json
import shutil
from typing import Any

import numpy as np
import torch

from specbuild.builder.frontend import checkpoint as checkpoints
from specbuild.builder.frontend.quiet import quiet
from specbuild.runtime.bundle.atomic_output import check_output, staging
from specbuild.runtime.errors import CheckpointError, OptionError

from . import texts
from .data import Corpus, Progress, make
from .make import Plan, files_of_tokenizer
from .options import DistillConfig
from .student import Student
from .teacher import Course, Teacher
from .train import Trainer, TrainingResult, narrow, scalars
from .validate import Exam
from .work import Work

REPORT = "training.json"
RUNS = "runs"  # TensorBoard's folder


@quiet()
def distill(config: DistillConfig, progress: Progress = lambda what, done, total, note: None) -> dict[str, Any]:
    """Train a draft and write it to `config.output` as a Hugging Face checkpoint; return the contents of REPORT.

    An interrupted training stays in `config.work`, from which `config.resume` continues. Inputs are checked before any
    weights are loaded where possible.

    Args:
        config: The distillation's options.
        progress: Called with the phase, the amount done, the total amount, and a note.

    Raises:
        OptionError: The options do not fit the target, the texts, or the training to resume.
        CheckpointError: The target, or the draft to continue, cannot be used.
        OutputError: The output or the work folder cannot be written, is damaged, or would be overwritten.
        ExecutionError: torch.compile fails.
    """
    _check_output(config)
    device, dtype = machine(config)
    target = checkpoints.find(config.target)
    plan = Plan.of(config, target)
    given = texts.read(config.text, target)
    identity = config.identity() | {
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "target_sha256": target.sha256(),
        "text_sha256": hashlib.sha256(json.dumps(given).encode()).hexdigest(),
        "init_sha256": plan.before.sha256() if plan.before else config.init,
    }
    work, threads = Work.open(config.work, identity, config.resume, config.force), torch.get_num_threads()
    torch.set_num_threads(work.threads)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            report = _distilled(plan, given, identity, work, device, dtype, progress)
    except (OptionError, CheckpointError):  # nothing to resume: the same options would fail again
        if not config.resume:
            work.remove()
        raise
    else:
        work.remove()
        return report
    finally:
        torch.set_num_threads(threads)
        work.lock.close()


def _distilled(
    plan: Plan,
    given: list[list[int]],
    identity: dict[str, Any],
    work: Work,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
) -> dict[str, Any]:
    config, target = plan.config, plan.target
    progress("loading the target", 0, 1, "")
    model = checkpoints.load(target, "sdpa").to(device)
    narrow(model, dtype)
    corpus = make(config, target, model, given, work, progress)
    student, began = plan.student(model, np.bincount(corpus.rows.ravel(), minlength=target.vocab_size))
    student.to(device)
    teacher = Teacher(model, student.taps)
    course = Course.of(teacher, corpus, work, config.batch_size, progress)
    exam = Exam.of(corpus, teacher, config.batch_size)
    known = work.load("state")
    scalar, close = scalars(work.folder / RUNS, known[1]["step"] if known else 0)
    try:
        found = Trainer(config, student, course, corpus, exam, work, dtype, progress, scalar).run()
    finally:
        close()
    progress("writing the draft", 0, 1, "")
    report = _report(config, identity, corpus, student, began, found)
    size = sum(p.numel() * 4 for p in student.net.parameters())
    with staging(config.output, size, lambda: _check_output(config)) as folder:
        student.save(folder)
        for path in files_of_tokenizer(target):
            shutil.copy(path, folder / path.name)
        if (work.folder / RUNS).is_dir():
            shutil.copytree(work.folder / RUNS, folder / RUNS)
        (folder / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def _check_output(config: DistillConfig) -> None:
    check_output(config.output, config.force, REPORT, "draft that specbuild made")


def machine(config: DistillConfig) -> tuple[torch.device, torch.dtype]:
    """Return the device and dtype to train in: by default a GPU if there is one, and bfloat16 if it is fast there.

    Raises OptionError if `--device cuda` finds no GPU.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise OptionError("there is no GPU that torch can use: drop --device cuda")
    cuda = config.device != "cpu" and torch.cuda.is_available()
    fast = torch.cuda.is_bf16_supported() if cuda else torch.ops.mkldnn._is_mkldnn_bf16_supported()
    narrower = config.dtype == "bf16" or (config.dtype == "auto" and fast)
    return torch.device("cuda" if cuda else "cpu"), torch.bfloat16 if narrower else torch.float32


def _report(
    config: DistillConfig,
    identity: dict[str, Any],
    corpus: Corpus,
    student: Student,
    began: dict[str, int],
    found: TrainingResult,
) -> dict[str, Any]:
    return {
        "draft": str(config.output),
        "options": config.to_dict() | {name: identity[name] for name in ("device", "dtype")},
        "target_sha256": identity["target_sha256"],
        "text_sha256": identity["text_sha256"],
        "parameters": sum(p.numel() for p in student.net.parameters()),
        "draft_vocab_size": len(student.tokens),
        "began_as": began,
        "texts": {"tokens": corpus.rows.size, "rows": len(corpus.rows), "judged_by": len(corpus.exam)},
        "depth": config.depth,
        "acceptance_length": found.best,
        "best_step": found.best_step,
        "steps": found.step,
        "tokens": found.tokens,
        "seconds": round(found.seconds, 1),
        "curve": found.curve,
        "torch": torch.__version__,
    }
