"""Text to tokens and back: inverse for any text, chats by their template, and what is refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbuild.runtime.errors import BundleError, ExecutionError, PromptError
from specbuild.runtime.requests.tokenizer import Tokenizer

texts = st.text(st.characters(codec="utf-8"), max_size=30)


@given(text=texts)
def test_encode_and_decode_are_inverse(tokenizer, text):
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert all(0 <= token < tokenizer.vocab_size for token in tokens)


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", "not json"])
def test_a_broken_tokenizer_is_the_bundles_error(tmp_path, content):
    file = tmp_path / "tokenizer.json"
    file.write_text(content)
    with pytest.raises(BundleError):
        Tokenizer(file, None, {})


@pytest.mark.parametrize("pairs", [True, False])
def test_merges_that_would_end_the_process_are_refused(pairs):
    """`tokenizers` aborts where it cuts a prefix off a part that has another, in the middle of a character."""
    model = {"type": "BPE", "vocab": {"a": 0, "##b": 1, "ab": 2}, "continuing_subword_prefix": "##"}
    for parts in (["a", "##b"], ["a", "b"]):
        spec = {"model": model | {"merges": [parts if pairs else " ".join(parts)]}}
        if "##b" in parts:
            assert Tokenizer(json.dumps(spec).encode(), None, {}).encode("ab") == [2]
            continue
        with pytest.raises(BundleError, match="does not begin with the prefix '##'"):
            Tokenizer(json.dumps(spec).encode(), None, {})


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
def test_a_panic_of_the_library_is_an_error_of_ours(pair, tokenizer, part):
    """A pattern that tries every way to divide a row of spaces ends in a panic, which is no Exception."""
    spec = json.loads((pair / "target" / "tokenizer.json").read_text(encoding="utf-8"))
    hostile = {"type": "Replace", "pattern": {"Regex": r"( +)+\(y"}, "content": "z"}
    spec[part] = {"type": "Sequence", f"{part}s": [*filter(None, [spec[part]]), hostile]}
    broken, spaces = Tokenizer(json.dumps(spec).encode(), None, {}), " " * 60
    if part == "normalizer":
        kind, told, call = PromptError, "read this prompt", lambda: broken.encode(spaces)
    else:
        kind, told, call = ExecutionError, "make a text of these", lambda: broken.decode(tokenizer.encode(spaces))
    with pytest.raises(kind, match=rf"^the bundle's tokenizer cannot {told}.*limit"):
        call()
    assert broken.decode(broken.encode("import os")) == "import os"
