"""Measures what quantization costs: how far a model moves on held-out texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbuild.builder.frontend.layer_by_layer import LayeredModel
from specbuild.builder.frontend.logits_file import LOWEST, Logits
from specbuild.measure.divergence import by_rows, kl
from specbuild.runtime.sampling.logprobs import log_softmax

MAX_LOGITS = 1 << 26  # maximum number of logits of held-out texts
BEGINNING, NEW_TOKENS = 32, 64  # maximum tokens of a text's beginning and of its greedy continuation
DEPTH = 4  # length of the chain with which a draft's acceptance length is measured


@dataclass(frozen=True, slots=True)
class Before:
    """A model's results in float32: the logits of held-out texts."""

    texts: list[list[int]]
    logits: Sequence[Logits]

    @classmethod
    def of(cls, model: LayeredModel, texts: Sequence[Sequence[int]]) -> Before:
        """Compute a float32 model's logits of texts; fewer are kept for a larger vocabulary, by MAX_LOGITS."""
        max_tokens = max(1, MAX_LOGITS // model.net.config.get_text_config().vocab_size)
        kept, tokens = list[list[int]](), 0
        for text in texts:
            if kept and tokens + len(text) > max_tokens:
                break
            kept.append(list(text[:max_tokens]))
            tokens += len(text)
        return cls(kept, model.logits(kept))


def moved(before: Before, after: Iterable[Logits]) -> dict[str, Any]:
    """Measure how far a model has moved, as a dict for reports: over the tokens of the held-out texts.

    `perplexity` is [before, after]. `after` has the moved model's logits of each text.
    """
    told = [_token_measures(text, *both) for text, *both in zip(before.texts, before.logits, after, strict=True)]
    divergence, cosine, agreed, exactly, narrowly = map(np.concatenate, zip(*told, strict=True))
    return {
        "tokens": len(divergence),
        "kl_nats_per_token": float(divergence.mean()),
        "kl_standard_error": float(divergence.std() / len(divergence) ** 0.5),
        "kl_largest": float(divergence.max()),
        "logit_cosine": float(cosine.mean()),
        "perplexity": [float(np.exp(-each.mean())) if len(each) else None for each in (exactly, narrowly)],
        "top1_agreement": float(agreed.mean()),
    }


def beginnings(before: Before, positions: int) -> tuple[list[list[int]], int]:
    """Return the beginnings of the held-out texts, to be continued, and by how many tokens at most."""
    new = min(NEW_TOKENS, positions // 2)
    return [text[: min(BEGINNING, positions - new)] for text in before.texts], new


def first_divergence(prompt: Sequence[int], tokens: Sequence[int], exact: Logits) -> int | None:
    """Return how many greedy tokens two models have in common, None if all.

    Up to there both have written the same text, so it makes no difference which of them wrote it.

    Args:
        prompt: The text's beginning.
        tokens: One model's greedy continuation.
        exact: The other's logits after each token of both but the last.
    """
    different = np.flatnonzero(exact[len(prompt) - 1 :].argmax(1) != np.array(tokens))
    return int(different[0]) if len(different) else None


def _token_measures(text: Sequence[int], before: Logits, after: Logits) -> tuple[NDArray[Any], ...]:
    """Return for each token KL, cosine, top-1 agreement, and the next token's log-probability before and after.

    A draft may have some of the target's tokens alone: the others have no logits, and as next tokens do not count.
    """
    own, following = before[0] > LOWEST, np.array(text[1:], dtype=np.int64)
    if not own.all():
        before, after = before[:, own], after[:, own]
    drafted, columns = own[following], (np.cumsum(own) - 1)[following]
    nexts = [by_rows(_log_probability, each[:-1][drafted], columns[drafted]) for each in (before, after)]
    return kl(before, after), by_rows(_cosine, before, after), before.argmax(1) == after.argmax(1), *nexts


def _cosine(a: Logits, b: Logits) -> NDArray[np.float64]:
    """Return the cosine of each pair of rows, centred first because a softmax ignores a constant."""
    a, b = (x.astype(np.float64) - x.mean(1, keepdims=True, dtype=np.float64) for x in (a, b))
    return np.asarray((a * b).sum(1) / np.maximum(np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1), 1e-30))


def _log_probability(logits: Logits, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.asarray(log_softmax(logits)[np.arange(len(tokens)), tokens])


def acceptance(target: Before, drafted: Sequence[Logits]) -> float:
    """Return a draft's acceptance length: tokens per round of chains of DEPTH, after the tokens of held-out texts.

    The target accepts what it would have chosen itself after the same text.

    Args:
        target: What the float32 target computes of the texts.
        drafted: The draft's logits of the same texts, or of their beginnings.
    """
    tokens = rounds = 0
    for exact, draft in zip(target.logits, drafted, strict=False):
        length = min(len(exact), len(draft))
        right, at = exact[:length].argmax(1) == draft[:length].argmax(1), 0
        while at < length:
            wrong = np.flatnonzero(~right[at : at + DEPTH])
            accepted = int(wrong[0]) if len(wrong) else min(DEPTH, length - at)
            at, rounds, tokens = at + accepted + 1, rounds + 1, tokens + accepted + 1
    return tokens / max(1, rounds)
