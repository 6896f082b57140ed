"""Log-probabilities in OpenAI's two shapes, with the texts of their tokens."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from specbuild.runtime import Engine, TokenLogprobs
from specbuild.runtime.requests.tokenizer import Tokenizer

LOWEST = -9999.0  # vLLM's stand-in for minus infinity, which JSON lacks


class Offsets:
    """Finds where tokens begin in their text, in characters. A token that begins inside a character has its offset."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], shows: Callable[[str, int], bool]) -> None:
        """Begin at the text's first character.

        Args:
            tokenizer: The model's tokenizer.
            prompt: The tokens before the text.
            shows: Whether a special token, given as text, is part of the text at an offset.
        """
        self._tokenizer, self._shows = tokenizer, shows
        self._decoder, self._length = tokenizer.decoder(prompt, skip_special_tokens=False), 0  # in whole characters
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # holds the bytes that the text does not have yet

    def next(self, token: int) -> int:
        """Return where the next token begins."""
        held = self._utf8.getstate()[0]
        begun = _unfinished(held)
        here = self._length + len(held[: len(held) - len(begun)].decode(errors="replace"))
        if self._is_special(token) and not self._shows(self._tokenizer.token_text(token), here):
            return here
        data = self._tokenizer.token_bytes(token)
        offset = here + (begun != b"" and not _joins(begun, data))
        self._utf8.decode(data)
        self._length += len(self._decoder.feed((token,)))
        return offset

    def _is_special(self, token: int) -> bool:
        text, shown = (self._tokenizer.decode([token], skips) for skips in (False, True))
        return text != shown


def _joins(begun: bytes, data: bytes) -> bool:
    """Return whether the first of these bytes is of the character that has begun."""
    return len((begun + data[:1]).decode(errors="replace")) == 1


def _unfinished(data: bytes) -> bytes:
    """Return the last bytes if they begin a character that more bytes may end.

    Python's incremental decoder also holds a surrogate's first two bytes, which no byte can make a character.
    """
    for size in (3, 2, 1):
        try:
            data[-size:].decode()
        except UnicodeDecodeError as error:
            if error.start == 0 and error.reason == "unexpected end of data":
                return data[-size:]
    return b""


def completion(engine: Engine, tokens: Iterable[tuple[int, TokenLogprobs | None, int]]) -> dict[str, list[Any]]:
    """Return a completion's log-probabilities; `tokens`: each with its log-probability and its offset in the text."""
    told: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, each, offset in tokens:
        told["tokens"].append(engine.tokenizer.token_text(token))
        told["token_logprobs"].append(max(each.logprob, LOWEST) if each else None)
        told["top_logprobs"].append(_best(engine, each) if each else None)
        told["text_offset"].append(offset)
    return told


def _best(engine: Engine, each: TokenLogprobs) -> dict[str, float]:
    """Return the likeliest tokens' log-probabilities by text; of two tokens with one text, the likelier one's."""
    best = {engine.tokenizer.token_text(each.token_id): max(each.logprob, LOWEST)}
    for token, logprob in each.top:
        text = engine.tokenizer.token_text(token)
        best[text] = max(best.get(text, LOWEST), logprob)
    return best


def chat(engine: Engine, given: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Return a chat's log-probabilities of a message's tokens."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        text, data = engine.tokenizer.token_text(token), engine.tokenizer.token_bytes(token)
        return {"token": text, "logprob": max(logprob, LOWEST), "bytes": list(data)}

    return {
        "content": [
            {**one(each.token_id, each.logprob), "top_logprobs": [one(*pair) for pair in each.top]} for each in given
        ]
    }
