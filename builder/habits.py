"""The tokens that mostly follow one or two tokens in common texts: a bundle's habits, until its engine learns its own.

They are counted in the user's calibration texts, and in the code and English of Python's standard library, which every
machine with specbuild has. They are only drafted, where a step has a row to spare: no output token depends on them.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from specbuild.runtime.drafting.habits import FILE

from .frontend.checkpoint import encode

CHARACTERS = 1_000_000  # of the standard library that are read, at most
MOST = 1 << 14  # contexts that are kept of each length, one and two tokens
Tokens = NDArray[np.int64]


def save_habits(folder: Path, tokenizer: PreTrainedTokenizerBase, own: Sequence[Sequence[int]]) -> None:
    """Write a bundle's habits.json.

    Args:
        folder: The bundle.
        tokenizer: The target's tokenizer.
        own: The user's texts, as token ids.

    Raises:
        CheckpointError: The tokenizer fails on a text.
    """
    texts = [np.array(each, np.int64) for each in (*own, *encode(tokenizer, list(_library())))]
    one, two = (mostly(texts, length) for length in (1, 2))
    lists = np.concatenate([np.insert(one, 0, -1, axis=1), two]).T.tolist()
    told = {"schema": 1} | dict(zip(("before", "last", "next"), lists, strict=True))
    (folder / FILE).write_text(json.dumps(told, separators=(",", ":")) + "\n", encoding="utf-8")


def mostly(texts: Sequence[Tokens], length: int) -> Tokens:
    """Return contexts of `length` tokens, each with the token that follows it most often: `int64[N, length + 1]`.

    Only pairs that occur twice or more count; of these the MOST most frequent ones are kept, the most frequent first.
    """
    windows = [np.lib.stride_tricks.sliding_window_view(each, length + 1) for each in texts if len(each) > length]
    if not windows:
        return np.zeros((0, length + 1), np.int64)
    several = np.concatenate(windows)
    places = (int(several.max()) + 1) ** np.arange(length, -1, -1)  # encode each window as one number
    numbers, counts = np.unique(several @ places, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    numbers, counts = numbers[order], counts[order]
    _, first = np.unique(numbers // places[-2], return_index=True)  # each context's most frequent window
    kept = np.sort(first[counts[first] > 1])[:MOST]
    return np.asarray(numbers[kept, None] // places % places[-2])


def _library() -> Iterable[str]:
    """Yield whole files of Python's standard library in the order of their names, up to CHARACTERS together."""
    left = CHARACTERS
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        left -= len(text)
        if left < 0:
            return
        yield text
