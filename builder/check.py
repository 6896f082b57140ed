"""The check at the end of a build: the bundle against Hugging Face and against itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..runtime import Engine, SamplingParams
from ..runtime.errors import ExecutionError
from ..runtime.verify import Case, compare, plain
from .reference import Reference

NEW_TOKENS = 32
LOGIT_TOLERANCE = 1e-3  # relative to the largest logit; rounding stays two orders below
PROMPTS = (
    "The quick brown fox jumps over the lazy dog, and then",
    "def fibonacci(n):\n    ",
    "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. 日本語も",
    "\n",
    "1, 2, 3, 4, 5, 6, 7, 8, ",
)


def tokenize(tokenizer: Any, max_seq_len: int) -> tuple[list[list[int]], int]:
    """The check's prompts as token ids, cut to what the bundle holds, and how many tokens of output fit after them."""
    room = max(1, max_seq_len - NEW_TOKENS)
    prompts = [ids for ids in (tokenizer(text)["input_ids"][:room] for text in PROMPTS) if ids]
    return prompts, min(NEW_TOKENS, max_seq_len - max(map(len, prompts)))


def check(folder: Path, references: Sequence[Reference], new_tokens: int) -> dict[str, Any]:
    """Decode with and without speculation, greedy and sampled; raises ExecutionError where tokens really differ."""
    prompts = [reference.prompt for reference in references]
    hugging_face = [reference.tokens for reference in references]
    greedy = SamplingParams(max_new_tokens=new_tokens, seed=0)
    sampled = replace(greedy, temperature=1.0, top_p=0.95)
    with Engine.load(folder) as engine:
        gap = max(float(np.abs(engine.logits(r.prompt) - r.logits).max()) for r in references)
        off = [replace(greedy, speculation="off")] * len(prompts)
        cases = [compare(engine, "plain decoding against Hugging Face", prompts, off, hugging_face)]
        for name, params in (("greedy", greedy), ("temperature 1, top-p 0.95", sampled)):
            each = [params] * len(prompts)
            expected = plain(engine, prompts, each)
            cases.append(compare(engine, f"{name}: default tree against plain decoding", prompts, each, expected))
        bound = engine.manifest.exactness_bound
        largest = max(float(np.abs(r.logits).max()) for r in references)
    _raise_real(cases)
    if gap > LOGIT_TOLERANCE * max(1.0, largest):
        raise ExecutionError(f"the bundle's logits differ from Hugging Face's by up to {gap:.2g}: nothing was written")
    return {"bound": bound, "largest_logit_difference": gap, "cases": [case.to_dict() for case in cases]}


def _raise_real(cases: Sequence[Case]) -> None:
    for case in cases:
        for divergence in case.divergences:
            if divergence.real:
                raise ExecutionError(
                    f"the bundle is not exact ({case.name}: prompt {divergence.prompt + 1}, token "
                    f"{divergence.position}, {divergence.got} for {divergence.expected}, "
                    f"margin {divergence.margin:.2g}): nothing was written"
                )
