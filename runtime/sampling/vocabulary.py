"""`Vocabulary`: a model's tokens, as structured outputs need them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model and what they write.

    Attributes:
        tokenizer: The text of a tokenizer.json.
        tokens: The bytes that each token adds to a text, or a special token's name; empty for an id that is no token.
        special: Ids of the tokens that are no text: special tokens, and those that end a text.
        added: Names of the added tokens that are text, such as <think> in Qwen 3, by their ids.
        ends: Ids of the tokens that end a text.
    """

    tokenizer: str
    tokens: tuple[bytes, ...]
    special: frozenset[int]
    added: Mapping[int, str]
    ends: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON data that `from_dict` reads."""
        return {
            "tokenizer": self.tokenizer,
            "tokens": [token.decode("latin-1") for token in self.tokens],
            "special": sorted(self.special),
            "added": list(self.added.items()),
            "ends": list(self.ends),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Vocabulary:
        """Return the vocabulary that `to_dict` wrote."""
        return cls(
            tokenizer=data["tokenizer"],
            tokens=tuple(token.encode("latin-1") for token in data["tokens"]),
            special=frozenset(data["special"]),
            added=dict(data["added"]),
            ends=tuple(data["ends"]),
        )
