"""Validation: the acceptance length of a draft's greedy chains on held-out texts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from .data import Corpus
from .student import Lesson, Student
from .teacher import Teacher


@dataclass(frozen=True)
class Exam:
    """Held-out prompts of `start` tokens with the target's greedy continuations; `ends` as in `Corpus`."""

    lessons: list[Lesson]
    start: int
    ends: NDArray[np.int64]

    @classmethod
    def of(cls, corpus: Corpus, teacher: Teacher, batch: int) -> Exam:
        """Run the teacher on the corpus's held-out rows, `batch` at a time."""
        tokens = torch.from_numpy(corpus.exam.astype(np.int64))
        return cls([teacher(part) for part in torch.split(tokens, batch)], corpus.start, corpus.ends)

    def acceptance_length(self, student: Student, depth: int) -> float:
        """Return the tokens per round, the target's own included, with chains of `depth`; 1 if no text is long enough.

        The first round's root is the first token of the continuation, which the target's prefill gives. Only rounds
        with room for a whole chain count, so that a text's end shortens none.
        """
        training = student.net.training
        student.net.eval()
        with torch.no_grad():
            agrees = np.concatenate([student.agreement(lesson, depth).cpu().numpy() for lesson in self.lessons])
        student.net.train(training)
        accepted = np.logical_and.accumulate(agrees, axis=2).sum(2)
        tokens = rounds = 0
        for row, end in zip(accepted, self.ends, strict=True):
            at = self.start
            while at + depth < end:
                rounds, tokens = rounds + 1, tokens + int(row[at]) + 1
                at += int(row[at]) + 1
        return tokens / rounds if rounds else 1.0
