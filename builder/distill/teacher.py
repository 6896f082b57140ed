"""The target as teacher: its likeliest next tokens, and its hidden states if a student asks for them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from specbuild.builder.frontend.hidden_state_taps import Taps

from .data import Corpus, Progress
from .student import Lesson
from .work import Work

LIKELIEST = 64  # tokens of each distribution that are recorded
MAX_RECORDED = 2 << 30  # bytes; for a larger corpus the target runs again at every step
ROWS = 64  # rows in a file of the record


@dataclass(frozen=True)
class Teacher:
    """A target in evaluation mode. taps: the layers whose inputs a lesson holds, concatenated."""

    model: PreTrainedModel
    taps: tuple[int, ...] = ()

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Lesson:
        """Run the target on texts `int64[B, T]`; return the lesson, on the target's device."""
        tokens = tokens.to(self.model.device)
        output, states = self._run(self.model, tokens)
        ids, probs = zip(*map(self._likeliest, output.logits), strict=True)
        return Lesson(tokens, torch.stack(ids), torch.stack(probs), states)

    @torch.no_grad()
    def states(self, tokens: Tensor) -> Tensor | None:
        """Return only a lesson's taps, without computing logits; None if there are none."""
        return self._run(self.model.base_model, tokens)[1] if self.taps else None

    def _run(self, part: nn.Module, tokens: Tensor) -> tuple[Any, Tensor | None]:
        """Return the output of `part`, the model or its layers alone, and the taps, or None if there are none."""
        taps = Taps(self.taps, nn.Identity())
        with taps.watching(self.model) if self.taps else nullcontext():
            output = part(input_ids=tokens, use_cache=False)
            return output, taps.states() if self.taps else None

    def _likeliest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        logits = logits.float()
        best, ids = logits.topk(min(LIKELIEST, logits.shape[-1]), sorted=False)
        return ids, (best - logits.logsumexp(-1, keepdim=True)).exp()


@dataclass(frozen=True)
class Course:
    """The corpus's lessons by row index: recorded once if they fit into MAX_RECORDED, else computed every time."""

    teacher: Teacher
    rows: NDArray[np.int32]
    ids: NDArray[np.integer] | None = None  # [N, T, k]
    probs: NDArray[np.float16] | None = None

    @classmethod
    def of(cls, teacher: Teacher, corpus: Corpus, work: Work, batch: int, progress: Progress) -> Course:
        """Run the target on all rows once and record its predictions, if they fit; hidden states are never recorded."""
        rows, vocabulary = corpus.rows, teacher.model.config.get_text_config().vocab_size
        kind = np.uint16 if vocabulary <= 1 << 16 else np.int32
        shape = (*rows.shape, min(LIKELIEST, vocabulary))
        if np.prod(shape) * (kind().itemsize + 2) > MAX_RECORDED:
            return cls(teacher, rows)
        ids, probs, reader = np.empty(shape, kind), np.empty(shape, np.float16), replace(teacher, taps=())
        for first in range(0, len(rows), ROWS):
            progress("the target reads", first, len(rows), f"{first * rows.shape[1]} tokens")
            part = slice(first, min(first + ROWS, len(rows)))

            def read(part: slice = part) -> dict[str, NDArray]:
                numbers = range(part.start, part.stop, batch)
                lessons = [reader(torch.from_numpy(rows[part][n - part.start :][:batch]).long()) for n in numbers]
                return {
                    "ids": np.concatenate([lesson.ids.cpu().numpy().astype(kind) for lesson in lessons]),
                    "probs": np.concatenate([lesson.probs.half().cpu().numpy() for lesson in lessons]),
                }

            kept = work.kept(f"read-{first // ROWS}", read)
            ids[part], probs[part] = kept["ids"], kept["probs"]
        return cls(teacher, rows, ids, probs)

    def lesson(self, numbers: NDArray[np.int64]) -> Lesson:
        """Return the lesson of these rows, on the target's device."""
        tokens, device = torch.from_numpy(self.rows[numbers].astype(np.int64)), self.teacher.model.device
        if self.ids is None or self.probs is None:
            return self.teacher(tokens)
        ids = torch.from_numpy(self.ids[numbers].astype(np.int64)).to(device)
        probs = torch.from_numpy(self.probs[numbers].astype(np.float32)).to(device)
        tokens = tokens.to(device)
        return Lesson(tokens, ids, probs, self.teacher.states(tokens))
