"""What common texts say after one and two tokens: a bundle's habits, until its engine has some of its own.

Counted in the user's calibration texts, and in the code and English of Python's standard library, which is wherever
specbuild is. No token of a text depends on it: it is drafted where a step has a row to spare.
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

CHARACTERS = 1_000_000  # of the library that are read
MOST = 1 << 14  # contexts of one token, and of two, that are kept
Tokens = NDArray[np.int64]


def save_habits(folder: Path, tokenizer: PreTrainedTokenizerBase, own: Sequence[Sequence[int]]) -> None:
    """Write them into a bundle. own: the user's texts, as tokens; raises CheckpointError."""
    texts = [np.array(each, np.int64) for each in (*own, *encode(tokenizer, list(_library())))]
    one, two = (mostly(texts, length) for length in (1, 2))
    lists = np.concatenate([np.insert(one, 0, -1, axis=1), two]).T.tolist()
    told = {"schema": 1} | dict(zip(("before", "last", "next"), lists, strict=True))
    (folder / FILE).write_text(json.dumps(told, separators=(",", ":")) + "\n", encoding="utf-8")


def mostly(texts: Sequence[Tokens], length: int) -> Tokens:
    """`int64[N, length + 1]`: contexts that come twice or oftener, and what mostly follows each; MOST, the surest."""
    windows = [np.lib.stride_tricks.sliding_window_view(each, length + 1) for each in texts if len(each) > length]
    if not windows:
        return np.zeros((0, length + 1), np.int64)
    several = np.concatenate(windows)
    places = (int(several.max()) + 1) ** np.arange(length, -1, -1)  # each window as one number
    numbers, counts = np.unique(several @ places, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    numbers, counts = numbers[order], counts[order]
    _, first = np.unique(numbers // places[-2], return_index=True)  # of each context, its surest
    kept = np.sort(first[counts[first] > 1])[:MOST]
    return np.asarray(numbers[kept, None] // places % places[-2])


def _library() -> Iterable[str]:
    """Texts of Python's standard library, whole files in the order of their names."""
    left = CHARACTERS
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        left -= len(text)
        if left < 0:
            return
        yield text
