"""The check at the end of a build: the bundle against Hugging Face and against itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..runtime import Engine, SamplingParams
from ..runtime.errors import ExecutionError
from ..runtime.logprobs import log_softmax
from ..runtime.verify import Case, compare, plain
from .reference import Reference

NEW_TOKENS = 32
MOST_DIVERGENCE = 0.05  # nats a token, in any precision: more is another model
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


def rounding(folder: Path, references: Sequence[Reference]) -> float:
    """How far two ways of computing the same logits lie apart at most: a token a step, and many."""
    with Engine.load(folder) as engine:
        pairs = [(engine.text_logits(r.text), engine.text_logits(r.text, nodes=1)) for r in references]
    return max(float(np.abs(many - one).max()) for many, one in pairs)


def check(
    folder: Path, references: Sequence[Reference], logits: Sequence[NDArray[np.float32]], new_tokens: int
) -> dict[str, Any]:
    """Hold the logits against Hugging Face's, decode with and without speculation, greedy and sampled.

    `logits`: Hugging Face's, of each reference's text. Raises ExecutionError where tokens really differ; in a precision
    that changes them the Kullback-Leibler divergence is held against a limit instead of plain decoding's tokens.
    """
    prompts = [reference.prompt for reference in references]
    greedy = SamplingParams(max_new_tokens=new_tokens, seed=0)
    sampled = replace(greedy, temperature=1.0, top_p=0.95)
    with Engine.load(folder) as engine:
        ours = [engine.text_logits(reference.text) for reference in references]
        gap = max(float(np.abs(a - b).max()) for a, b in zip(ours, logits, strict=True))
        divergence = float(np.concatenate([kl(b, a) for a, b in zip(ours, logits, strict=True)]).mean())
        cases = []
        if engine.manifest.precision == "fp32":
            off = [replace(greedy, speculation="off")] * len(prompts)
            hugging_face = [reference.tokens for reference in references]
            cases.append(compare(engine, "plain decoding against Hugging Face", prompts, off, hugging_face))
        for name, params in (("greedy", greedy), ("temperature 1, top-p 0.95", sampled)):
            each = [params] * len(prompts)
            expected = plain(engine, prompts, each)
            cases.append(compare(engine, f"{name}: default tree against plain decoding", prompts, each, expected))
        bound, precision = engine.manifest.exactness_bound, engine.manifest.precision
    _raise_real(cases)
    if precision == "fp32" and gap > LOGIT_TOLERANCE * max(1.0, *(float(np.abs(row).max()) for row in logits)):
        raise ExecutionError(f"the bundle's logits differ from Hugging Face's by up to {gap:.2g}: nothing was written")
    if divergence > MOST_DIVERGENCE:
        raise ExecutionError(
            f"{precision} changes this model too much, by {divergence:.2g} nats a token: nothing was written, use fp32"
        )
    return {
        "bound": bound,
        "largest_logit_difference": gap,
        "kl_nats_per_token": divergence,
        "cases": [case.to_dict() for case in cases],
    }


def kl(reference: NDArray[np.float32], logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """KL(reference ‖ other) of each row's softmax, in nats: `[T, V]` twice to `float64[T]`."""
    p, q = log_softmax(reference), log_softmax(logits)
    with np.errstate(invalid="ignore"):  # −inf where a token is impossible
        return np.asarray(np.where(np.isneginf(p), 0.0, np.exp(p) * (p - q)).sum(axis=1))


def _raise_real(cases: Sequence[Case]) -> None:
    for case in cases:
        for divergence in case.divergences:
            if divergence.real:
                raise ExecutionError(
                    f"the bundle is not exact ({case.name}: prompt {divergence.prompt + 1}, token "
                    f"{divergence.position}, {divergence.got} for {divergence.expected}, "
                    f"margin {divergence.margin:.2g}): nothing was written"
                )
