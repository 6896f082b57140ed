"""Log-probabilities in OpenAI's two shapes, with the texts of their tokens."""

from __future__ import annotations

from collections.abc import Sequence

from specbuild.runtime import Engine, TokenLogprobs

from .errors import ApiError
from .limits import ECHOED_LOGITS
from .responses import ChatLogprobs, CompletionLogprobs, TopLogprob

LOWEST = -9999.0  # vLLM's stand-in for minus infinity, which JSON lacks


def of_prompt(engine: Engine, tokens: Sequence[int], count: int) -> list[TokenLogprobs | None]:
    """Return log-probabilities of a prompt's tokens, None for the first; waits until nothing else runs.

    Raises ApiError if the prompt's logits would take too much memory.
    """
    size = 4 * len(tokens) * engine.manifest.models["target"].vocab_size
    if size > ECHOED_LOGITS:
        told = (
            f"echo with logprobs takes {size >> 20} MiB for this prompt, of {ECHOED_LOGITS >> 20} at most: shorten it"
        )
        raise ApiError(400, told, param="logprobs")
    if len(tokens) < 2:
        return [None] * len(tokens)
    rows = engine.text_logits(tokens[:-1])
    return [None, *(TokenLogprobs.of(row, token, count) for row, token in zip(rows, tokens[1:], strict=True))]


def completion(
    engine: Engine, tokens: Sequence[int], given: Sequence[TokenLogprobs | None], offset: int
) -> CompletionLogprobs:
    """Return a completion's log-probabilities; its first token begins at character `offset` of the text."""
    told: CompletionLogprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, each in zip(tokens, given, strict=True):
        told["tokens"].append(engine.tokenizer.token_text(token))
        told["token_logprobs"].append(max(each.logprob, LOWEST) if each else None)
        told["top_logprobs"].append(_best(engine, each) if each else None)
        told["text_offset"].append(offset)
        offset += len(told["tokens"][-1])
    return told


def _best(engine: Engine, each: TokenLogprobs) -> dict[str, float]:
    """Return the likeliest tokens' log-probabilities by text; of two tokens with one text, the likelier one's."""
    best = {engine.tokenizer.token_text(each.token_id): max(each.logprob, LOWEST)}
    for token, logprob in each.top:
        text = engine.tokenizer.token_text(token)
        best[text] = max(best.get(text, LOWEST), logprob)
    return best


def chat(engine: Engine, given: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """Return a chat's log-probabilities of a message's tokens."""

    def one(token: int, logprob: float) -> TopLogprob:
        text, data = engine.tokenizer.token_text(token), engine.tokenizer.token_bytes(token)
        return {"token": text, "logprob": max(logprob, LOWEST), "bytes": list(data)}

    return {
        "content": [
            {**one(each.token_id, each.logprob), "top_logprobs": [one(*pair) for pair in each.top]} for each in given
        ]
    }
