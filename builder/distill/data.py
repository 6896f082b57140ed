"""Training data: rows of tokens to learn from, and held-out prompts with the target's continuations to validate on."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from specbuild.builder.frontend.checkpoint import Checkpoint
from specbuild.runtime.errors import OptionError

from .generate import NEVER, write
from .options import DistillConfig
from .work import Work

Tokens = NDArray[np.int32]
Progress = Callable[[str, int, int, str], None]  # phase, amount done, total amount, note
SHORTEST = 64  # minimum number of tokens to learn from
HELD_OUT = 16  # one token in HELD_OUT is held out
EXAM_TEXTS = 64  # maximum number of held-out prompts
BATCH = 128  # rows that the target generates at once


@dataclass(frozen=True)
class Corpus:
    """Token rows to train on and to validate with.

    Attributes:
        rows: `int32[N, T]`, the training rows.
        exam: `int32[E, L]`, held-out prompts of `start` tokens, each followed by the target's greedy continuation.
        start: Length of the prompts in `exam`.
        ends: `int64[E]`, the number of valid tokens in each row of `exam`, up to and including the first EOS.
    """

    rows: Tokens
    exam: Tokens
    start: int
    ends: NDArray[np.int64]

    def batch(self, seed: int, first: int, size: int) -> NDArray[np.int64]:
        """Return the row indices of draws `first` to `first + size − 1`; each epoch is a new permutation, by `seed`."""
        drawn = (divmod(number, len(self.rows)) for number in range(first, first + size))
        return np.array([_order(seed, epoch, len(self.rows))[place] for epoch, place in drawn])


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, size: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(size)


def make(
    config: DistillConfig,
    target: Checkpoint,
    model: PreTrainedModel,
    texts: list[list[int]],
    work: Work,
    progress: Progress,
) -> Corpus:
    """Build the corpus from given texts, from text that the target generates, or from both.

    Args:
        config: The distillation's options.
        target: The target's checkpoint, for its BOS and EOS tokens.
        model: The target.
        texts: Token ids of the user's texts; may be empty.
        work: The folder that keeps generated rows for a resumed training.
        progress: Called as the target generates.

    Raises:
        OptionError: There are too few tokens to learn from, or the target has neither BOS nor EOS.
    """
    ends, start = target.eos_token_ids(), start_token(target)
    learned, held = _split(texts, config.seed)
    written = _written(config, model, learned, ends, start, work, progress)
    stream = np.array([token for text in [*learned, *written] for token in text], dtype=np.int32)
    if len(stream) < SHORTEST:
        raise OptionError(f"{len(stream)} tokens are too few to learn from: give more --text, or --generate some")
    length = min(config.sequence_length, len(stream))
    rows = stream[: len(stream) // length * length].reshape(-1, length)
    size = max(1, length // 4)

    def judged() -> dict[str, Tokens]:
        progress("writing texts to judge by", 0, 1, "")
        if len(held) >= size:
            count = min(EXAM_TEXTS, len(held) // size)
            begins = np.linspace(0, len(held) - size, count).astype(int)
            prompts = [held[begin : begin + size] for begin in begins]
        else:
            prompts = write(model, [[start]] * EXAM_TEXTS, size, [NEVER] * EXAM_TEXTS, ends, start, config.seed + 1)
        return {"exam": np.array(write(model, prompts, 2 * size, [0] * len(prompts), ends, start, 0), dtype=np.int32)}

    exam = work.kept("exam", judged)["exam"]
    ended = np.isin(exam[:, size:], ends)
    stops = np.where(ended.any(1), size + 1 + ended.argmax(1), exam.shape[1])
    return Corpus(rows, exam, size, stops)


def start_token(target: Checkpoint) -> int:
    """Return the token that begins a text: BOS, or else EOS. Raises OptionError if the target has neither."""
    bos = target.config.bos_token_id
    found = [*([bos] if isinstance(bos, int) else []), *target.eos_token_ids()]
    if not found:
        raise OptionError(f"{target.source} has neither a BOS nor an EOS token: add one to its config.json")
    return int(found[0])


def _split(texts: list[list[int]], seed: int) -> tuple[list[list[int]], list[int]]:
    """Shuffle the texts and cut off the last 1/HELD_OUT of their tokens; return the rest and the held-out tokens."""
    texts = random.Random(seed).sample(texts, len(texts))
    left = sum(map(len, texts)) // HELD_OUT
    held = list[int]()
    while texts and left > len(held):
        missing = left - len(held)
        held = texts[-1][-missing:] + held
        texts[-1:] = [texts[-1][:-missing]] if len(texts[-1]) > missing else []
    return texts, held


def _written(
    config: DistillConfig,
    model: PreTrainedModel,
    texts: Sequence[list[int]],
    ends: Sequence[int],
    start: int,
    work: Work,
    progress: Progress,
) -> list[list[int]]:
    """Return rows that the target generates from beginnings of texts, or from the start token if there are none.

    Half of the rows are sampled throughout, the others turn greedy after a sampled beginning.
    """
    wanted, length = config.to_generate, config.sequence_length
    rows = -(-wanted // length)
    found = list[list[int]]()
    for first in range(0, rows, BATCH):
        progress("the target writes", first * length, wanted, f"{first * length} tokens")
        rng = random.Random(f"{config.seed} {first}")
        size = min(BATCH, rows - first)
        least = min(8, length // 2)
        prompts = [rng.choice(texts)[: rng.randint(least, length // 2)] if texts else [start] for _ in range(size)]
        heads = [NEVER if row % 2 else rng.randint(1, length // 2) for row in range(size)]

        def batch(
            prompts: list[list[int]] = prompts, heads: list[int] = heads, seed: int = rng.getrandbits(60)
        ) -> dict:
            texts = write(model, prompts, length, heads, ends, start, seed)
            sizes = np.array([len(text) for text in texts], dtype=np.int32)
            return {"sizes": sizes, "tokens": np.array([t for text in texts for t in text], dtype=np.int32)}

        kept = work.kept(f"written-{first // BATCH}", batch)
        found += [part.tolist() for part in np.split(kept["tokens"], np.cumsum(kept["sizes"])[:-1])]
    return found
