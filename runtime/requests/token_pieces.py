"""`TokenPieces`: the bytes that each token adds to a text, by the steps of the tokenizer's decoder."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import tokenizers

from specbuild.runtime.errors import ExecutionError

from .byte_tokens import byte_fallback, byte_level
from .library import call

WHAT = "the bundle's tokenizer cannot make a text of these tokens"
_BY_TOKEN = ("Replace", "Metaspace", "WordPiece", "Strip")  # steps that look at one token, and whether it is the first
_BYTES = {"ByteFallback": byte_fallback, "ByteLevel": byte_level}
_OTHER = "\x01"  # a token before another one, which then is not the first; no decoder has a use for it


class Piece(NamedTuple):
    """The bytes of a token, as a text's first one and as a later one, and whether it is special."""

    first: bytes
    later: bytes
    special: bool


class Steps(NamedTuple):
    """A decoder in parts: what it does by token, how it writes bytes, and what it cuts off the text's beginning."""

    by_token: list[dict[str, Any]]
    bytes_of: Callable[[str], bytes | None] | None
    strips: list[tuple[str, int]]  # a character, and how many of it at most


def steps_of(decoder: dict[str, Any]) -> Steps | None:
    """Return a decoder's steps, given as JSON; None if a token's bytes also depend on the tokens around it."""
    rest = _flat(decoder)
    by_token, bytes_of = list[dict[str, Any]](), None
    while rest and rest[0]["type"] in _BY_TOKEN:
        by_token.append(rest.pop(0))
    if fused := bool(rest and rest[0]["type"] == "ByteLevel"):
        bytes_of = _BYTES[rest.pop(0)["type"]]
    elif rest and rest[0]["type"] == "ByteFallback":
        bytes_of = _BYTES[rest.pop(0)["type"]]
        while rest and rest[0]["type"] == "Metaspace":
            by_token.append(rest.pop(0))
    strips = list[tuple[str, int]]()
    for step in rest:
        if step["type"] == "Fuse":
            fused = True
        elif step["type"] == "Strip" and fused and not step["stop"]:
            strips.append((step["content"], step["start"]))
        else:
            return None
    return Steps(by_token, bytes_of, strips)


def _flat(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _flat(part)]


class TokenPieces:
    """The pieces of a tokenizer's tokens, each found once; safe to use from several threads."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, steps: Steps | None) -> None:
        """Make the pieces of a tokenizer; `steps`: of its decoder; None: it has none, and spaces join the tokens."""
        added = tokenizer.get_added_tokens_decoder()
        self._tokenizer, self._steps, self._added = tokenizer, steps, added
        self._special = {each.content for each in added.values() if each.special}
        self._decoder = _decoder(steps.by_token) if steps and steps.by_token else None
        self._found = dict[int, Piece]()
        self.strips = tuple(steps.strips) if steps else ()

    def __getitem__(self, token: int) -> Piece | None:
        """Return a token's piece; None if the tokenizer has no such token; raises ExecutionError."""
        try:
            return self._found[token]
        except (KeyError, TypeError):  # TypeError: it is no number, which the library tells
            piece: Piece | None = call(ExecutionError, WHAT, self._piece, token)
        if piece:
            self._found[token] = piece
        return piece

    def _piece(self, token: int) -> Piece | None:
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return None
        special = name in self._special or (token in self._added and self._added[token].special)
        if self._steps is None:
            return Piece(name.encode(), f" {name}".encode(), special)
        first, later = self._written(name)
        data = self._bytes(token, first)
        return Piece(data, data if later == first else self._bytes(token, later), special)

    def _written(self, name: str) -> tuple[str, str]:
        """Return a name as the steps by token write it: as a text's first token, and as a later one."""
        if self._decoder is None:
            return name, name
        before = self._decoder.decode([_OTHER])
        return self._decoder.decode([name]), self._decoder.decode([_OTHER, name])[len(before) :]

    def _bytes(self, token: int, name: str) -> bytes:
        bytes_of = self._steps and self._steps.bytes_of
        data = bytes_of(name) if bytes_of else None
        if data is None or (bytes_of is byte_level and self._is_text(token, data)):
            return name.encode()
        return data

    def _is_text(self, token: int, data: bytes) -> bool:
        """Return whether a token was added as a text that only looks like a name of bytes: "não" is not n, 0xE3, o."""
        if token not in self._added:
            return False
        try:
            data.decode()
        except UnicodeDecodeError:
            return self._tokenizer.model.token_to_id(self._added[token].content) is None
        return False


def _decoder(steps: list[dict[str, Any]]) -> Any:
    """Return the library's decoder of some steps."""
    model = {"type": "BPE", "vocab": {}, "merges": []}
    decoder = {"type": "Sequence", "decoders": steps}
    return tokenizers.Tokenizer.from_str(json.dumps({"model": model, "decoder": decoder})).decoder
