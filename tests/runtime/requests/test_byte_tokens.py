"""Bytes of tokens: names of both kinds, and a tokenizer's tokens put together again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from other_tokenizers import sentencepiece
from tokenizers import decoders

from specbuild.runtime import Engine, SamplingParams
from specbuild.runtime.requests.byte_tokens import byte_level
from specbuild.runtime.requests.tokenizer import Tokenizer

TEXT = "def größe(x):\n\treturn '日本 🙂'  # ok"


def test_special_tokens_are_text_where_that_is_asked_for(pair: Path) -> None:
    tokenizer = Tokenizer(pair / "target" / "tokenizer.json", None, {})
    tokens = tokenizer.encode("x<|endoftext|>y")
    assert tokenizer.decode(tokens) == "xy"
    assert tokenizer.decode(tokens, skip_special_tokens=False) == "x<|endoftext|>y"


def test_every_token_of_the_vocabulary_has_its_own_bytes(pair: Path) -> None:
    """Any bytes can be put together from them, and those of a text's tokens are the text's."""
    path = pair / "target" / "tokenizer.json"
    tokenizer = Tokenizer(path, None, {})
    for token, name in enumerate(map(tokenizers.Tokenizer.from_file(str(path)).id_to_token, range(4096))):
        assert tokenizer.token_bytes(token) == (name.encode() if name.startswith("<|") else byte_level(name)), name
    assert {bytes([byte]) for byte in range(256)} <= {*map(tokenizer.token_bytes, range(tokenizer.vocab_size))}
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(TEXT))).decode() == TEXT


@pytest.mark.parametrize("strips", [False, True])
def test_words_that_sentencepiece_writes_begin_with_their_spaces(strips: bool) -> None:
    """Its decoder may cut a text's first space off, which is a token's here, of several the first."""
    made = sentencepiece(["▁def", "▁▁", "▁▁▁▁", "x"])
    if strips:
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        made.decoder = decoders.Sequence(parts)
    tokenizer = Tokenizer(made.to_str().encode(), None, {})
    text = "x def    x  x 日🙂"
    tokens = tokenizer.encode(text)
    assert {"▁def", "▁▁", "<0xF0>"} <= {made.id_to_token(token) for token in tokens}
    assert b"".join(map(tokenizer.token_bytes, tokens)).decode() == f" {text}"
    for name, spaces in (("▁", 1), ("▁▁", 2), ("▁▁▁▁", 4)):
        assert tokenizer.token_text(made.token_to_id(name)) == " " * spaces


def test_a_result_has_special_tokens_where_that_is_asked_for(bundle: Path) -> None:
    """In its pieces too, and stop strings see them."""
    with Engine.load(bundle) as engine:
        (eos,) = engine.manifest.eos_token_ids
        name = engine.decode([eos], skip_special_tokens=False)
        asked: dict[str, Any] = {"max_new_tokens": 3, "ignore_eos": True, "logit_bias": {eos: 1e6}}
        assert engine.generate("x", SamplingParams(**asked))[0].text == ""
        kept = SamplingParams(**asked, skip_special_tokens=False)
        assert engine.generate("x", kept)[0].text == "".join(chunk.text for chunk in engine.stream("x", kept))
        assert engine.generate("x", kept)[0].text == 3 * name
        stopping = SamplingParams(**asked, skip_special_tokens=False, stop=[name[2:]])
        (stopped,) = engine.generate("x", stopping)
        assert (stopped.text, stopped.token_ids, stopped.finish_reason) == (name[:2], [eos], "stop")
        (unseen,) = engine.generate("x", SamplingParams(**asked, stop=[name[2:]]))
        assert (unseen.text, unseen.finish_reason) == ("", "length")
