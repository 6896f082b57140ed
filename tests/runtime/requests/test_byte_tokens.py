"""Bytes of tokens: names of both kinds, and a tokenizer's tokens put together again."""

from __future__ import annotations

from pathlib import Path

import pytest

from specbuild.runtime.requests.byte_tokens import bytes_of
from specbuild.runtime.requests.tokenizer import Tokenizer

TEXT = "def größe(x):\n\treturn '日本 🙂'  # ok"


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("<0xE2>", b"\xe2"),
        ("<0x0a>", b"\n"),
        ("Ġdef", b" def"),
        ("Ã¶", "ö".encode()),
        ("Ċ", b"\n"),
        ("日", None),
        ("", None),
    ],
)
def test_names(name: str, data: bytes | None) -> None:
    assert bytes_of(name) == data


def test_the_bytes_of_a_texts_tokens_are_the_texts(pair: Path) -> None:
    tokenizer = Tokenizer(pair / "target" / "tokenizer.json", None, {})
    tokens = tokenizer.encode(TEXT)
    assert b"".join(tokenizer.token_bytes(token) for token in tokens).decode() == TEXT
    ascii_tokens = tokenizer.encode("def main(argv):")
    assert "".join(tokenizer.token_text(token) for token in ascii_tokens) == "def main(argv):"


def test_special_tokens_are_text_where_that_is_asked_for(pair: Path) -> None:
    tokenizer = Tokenizer(pair / "target" / "tokenizer.json", None, {})
    tokens = tokenizer.encode("x<|endoftext|>y")
    assert tokenizer.decode(tokens) == "xy"
    assert tokenizer.decode(tokens, skip_special_tokens=False) == "x<|endoftext|>y"
