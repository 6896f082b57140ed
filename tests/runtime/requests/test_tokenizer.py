"""Text to tokens and back: inverse for any text, chats by their template, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.runtime.errors import BundleError, ExecutionError, PromptError
from specbuild.runtime.requests.chat import Chat
from specbuild.runtime.requests.tokenizer import Tokenizer

texts = st.text(st.characters(codec="utf-8"), max_size=30)


@settings(deadline=None)
@given(text=texts)
def test_encode_and_decode_are_inverse(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ids_are_taken_as_they_are(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode([5, 0, 4095]) == [5, 0, 4095]
    assert tokenizer.encode(()) == []
    assert tokenizer.vocab_size == 4096


def with_template(pair: Path, folder: Path, template: str) -> Tokenizer:
    file = folder / "chat_template.jinja"
    file.write_text(template, encoding="utf-8")
    return Tokenizer(pair / "target" / "tokenizer.json", file, {"eos_token": "<|endoftext|>"})


def test_messages_go_through_the_chat_template(pair: Path, tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    chat = with_template(pair, tmp_path, template)
    messages = [{"role": "user", "content": "hi"}]
    assert chat.chat_text(Chat(messages)) == "user: hi<|endoftext|>assistant:"
    assert chat.encode(messages).count(0) == 1
    assert chat.decode(chat.encode(messages)) == "user: hiassistant:"


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", "not json"])
def test_a_broken_tokenizer_is_the_bundles_error(tmp_path: Path, content: str) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(content)
    with pytest.raises(BundleError) as caught:
        Tokenizer(file, None, {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("pairs", [True, False])
def test_merges_that_would_end_the_process_are_refused(pair: Path, pairs: bool) -> None:
    """`tokenizers` aborts where it cuts a prefix off a part that has another, in the middle of a character."""
    spec = json.loads((pair / "target" / "tokenizer.json").read_text(encoding="utf-8"))
    merges = [each.split(" ") if isinstance(each, str) else each for each in spec["model"]["merges"]]
    spec["model"] |= {"continuing_subword_prefix": "a", "merges": merges if pairs else list(map(" ".join, merges))}
    with pytest.raises(BundleError, match="does not begin with the prefix 'a'"):
        Tokenizer(json.dumps(spec).encode(), None, {})


def test_merges_with_their_prefix_are_those_of_a_tokenizer() -> None:
    model = {
        "type": "BPE",
        "vocab": {"a": 0, "##b": 1, "ab": 2},
        "merges": ["a ##b"],
        "continuing_subword_prefix": "##",
    }
    assert Tokenizer(json.dumps({"model": model}).encode(), None, {}).encode("ab") == [2]


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
def test_a_panic_of_the_library_is_an_error_of_ours(pair: Path, tmp_path: Path, part: str) -> None:
    """A pattern that tries every way to divide a row of spaces ends in a panic, which is no Exception."""
    spec = json.loads((pair / "target" / "tokenizer.json").read_text(encoding="utf-8"))
    hostile = {"type": "Replace", "pattern": {"Regex": r"( +)+\(y"}, "content": "z"}
    spec[part] = {"type": "Sequence", f"{part}s": [*filter(None, [spec[part]]), hostile]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    sound, broken = (Tokenizer(folder / "tokenizer.json", None, {}) for folder in (pair / "target", tmp_path))
    spaces = " " * 60
    if part == "normalizer":
        with pytest.raises(
            PromptError, match=r"^the bundle's tokenizer cannot read this prompt: .*retry-limit"
        ) as found:
            broken.encode(spaces)
    else:
        with pytest.raises(
            ExecutionError, match=r"^the bundle's tokenizer cannot make a text of these.*limit"
        ) as found:
            broken.decode(sound.encode(spaces))
    assert "\n" not in str(found.value)
    assert broken.decode(broken.encode("import os")) == "import os"
