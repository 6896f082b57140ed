"""How long the texts are that a target would accept of a draft's greedy chains."""

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
    """Held-out beginnings of `start` tokens, and the target's greedy text; `ends`: the tokens of a row that count."""

    lessons: list[Lesson]
    start: int
    ends: NDArray[np.int64]

    @classmethod
    def of(cls, corpus: Corpus, teacher: Teacher, batch: int) -> Exam:
        """batch: rows that are looked at together."""
        tokens = torch.from_numpy(corpus.exam.astype(np.int64))
        return cls([teacher(part) for part in torch.split(tokens, batch)], corpus.start, corpus.ends)

    def acceptance_length(self, student: Student, depth: int) -> float:
        """Tokens a round, the target's own included, of chains of `depth`; 1 where no text is long enough for one.

        The first round's root is the first token of the continuation, which comes from the prompt. Only whole chains
        count: a text's end does not shorten one.
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
