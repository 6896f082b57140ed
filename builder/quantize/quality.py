"""Measures what quantization costs: how far a model moves on held-out texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from specbuild.builder.frontend.reference import Reference, greedy, text_logits
from specbuild.measure.divergence import by_rows, kl
from specbuild.runtime.sampling.logprobs import log_softmax

from .linears import no_grad, simulated
from .numbers import Quantized

Logits = NDArray[np.float32]
Compute = Callable[[Sequence[int]], Logits]
MAX_LOGITS = 1 << 26  # maximum number of logits in memory
BEGINNING, NEW_TOKENS = 32, 64  # maximum tokens of a held-out prompt and of its greedy continuation
DEPTH = 4  # length of the chain with which a draft's acceptance length is measured


@dataclass(frozen=True, slots=True)
class Before:
    """A model's results in float32: the logits of held-out texts, and greedy continuations of their beginnings."""

    texts: list[list[int]]
    logits: list[Logits]
    greedy: list[Reference]

    @classmethod
    def of(cls, model: PreTrainedModel, texts: Sequence[Sequence[int]], eos: Sequence[int], positions: int) -> Before:
        """Compute a float32 model's logits and greedy continuations.

        Args:
            model: The float32 model.
            texts: Held-out texts; fewer are kept for a larger vocabulary, as MAX_LOGITS bounds all logits.
            eos: The tokens that end a text.
            positions: Maximum number of tokens in a text.
        """
        max_tokens = max(1, MAX_LOGITS // model.config.get_text_config().vocab_size)
        kept, tokens = list[list[int]](), 0
        for text in texts:
            if kept and tokens + len(text) > max_tokens:
                break
            kept.append(list(text[:max_tokens]))
            tokens += len(text)
        new = min(NEW_TOKENS, positions // 2)
        prompts = [text[: min(BEGINNING, positions - new)] for text in kept]
        return cls(kept, cls.logits_of(model, kept).logits, greedy(model, prompts, new, eos))

    @classmethod
    def logits_of(cls, model: PreTrainedModel, texts: Sequence[Sequence[int]]) -> Before:
        """Compute the logits of texts, without greedy continuations."""
        with no_grad(model):
            return cls(list(map(list, texts)), [text_logits(model, text) for text in texts], [])


def moved(before: Before, compute: Compute) -> dict[str, Any]:
    """Measure how far a model has moved, as a dict for reports.

    KL, cosine and top-1 agreement are over the tokens of the held-out texts; `perplexity` is [before, after].
    `first_divergence` is the number of greedy tokens before the first different one, None if none differs. It needs no
    decoding, because up to there both models have generated the same text.

    Args:
        before: The float32 model's results.
        compute: Maps a text to the moved model's logits `[T, V]`.
    """
    told = [_told(text, exact, compute(text)) for text, exact in zip(before.texts, before.logits, strict=True)]
    divergence, cosine, agreed, exactly, narrowly = map(np.concatenate, zip(*told, strict=True))
    parted = [_first_divergence(reference, compute(reference.text)) for reference in before.greedy]
    return {
        "tokens": len(divergence),
        "kl_nats_per_token": float(divergence.mean()),
        "kl_standard_error": float(divergence.std() / len(divergence) ** 0.5),
        "kl_largest": float(divergence.max()),
        "logit_cosine": float(cosine.mean()),
        "perplexity": [float(np.exp(-each.mean())) if len(each) else None for each in (exactly, narrowly)],
        "top1_agreement": float(agreed.mean()),
        "first_divergence": parted,
        "greedy_tokens": [len(reference.tokens) for reference in before.greedy],
    }


def _told(text: Sequence[int], before: Logits, after: Logits) -> tuple[NDArray[Any], ...]:
    """Return for each token KL, cosine, top-1 agreement, and the next token's log-probability before and after."""
    nexts = [by_rows(_log_probability, each[:-1], np.array(text[1:], dtype=np.int64)) for each in (before, after)]
    return kl(before, after), by_rows(_cosine, before, after), before.argmax(1) == after.argmax(1), *nexts


def _cosine(a: Logits, b: Logits) -> NDArray[np.float64]:
    """Return the cosine of each pair of rows, centred first because a softmax ignores a constant."""
    a, b = (x.astype(np.float64) - x.mean(1, keepdims=True, dtype=np.float64) for x in (a, b))
    return np.asarray((a * b).sum(1) / np.maximum(np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1), 1e-30))


def _log_probability(logits: Logits, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.asarray(log_softmax(logits)[np.arange(len(tokens)), tokens])


def _first_divergence(reference: Reference, logits: Logits) -> int | None:
    chosen = logits[len(reference.prompt) - 1 :].argmax(1)
    different = np.flatnonzero(chosen != np.array(reference.tokens))
    return int(different[0]) if len(different) else None


def acceptance(model: PreTrainedModel, found: Mapping[str, Quantized], texts: Sequence[Reference]) -> list[float]:
    """Return a draft's acceptance length in float32 and quantized, with chains of DEPTH on the target's greedy text.

    Args:
        model: The float32 draft; it is unchanged afterwards.
        found: The draft's quantized weights, by name.
        texts: The target's greedy continuations.
    """
    with no_grad(model):
        before = _acceptance_length(model, texts)
        with simulated(model, found):
            return [before, _acceptance_length(model, texts)]


def _acceptance_length(model: PreTrainedModel, texts: Sequence[Reference]) -> float:
    """Return tokens per round: the target accepts what it would have generated, so its text gives accepted lengths."""
    tokens = rounds = 0
    for reference in texts:
        chosen = text_logits(model, reference.text)[len(reference.prompt) - 1 :].argmax(1)
        right, at = chosen == np.array(reference.tokens), 1  # the first token comes from the prompt
        while at < len(right):
            wrong = np.flatnonzero(~right[at : at + DEPTH])
            accepted = int(wrong[0]) if len(wrong) else min(DEPTH, len(right) - at)
            at, rounds, tokens = at + accepted + 1, rounds + 1, tokens + accepted + 1
    return tokens / max(1, rounds)
