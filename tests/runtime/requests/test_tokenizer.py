"""Text in and out: pieces add up to the whole, characters stay whole, nothing is taken back, stop strings stop."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.runtime.errors import BundleError, ExecutionError, PromptError
from specbuild.runtime.requests.chat import Chat
from specbuild.runtime.requests.tokenizer import Detokenizer, Tokenizer

token_lists = st.lists(st.integers(0, 4095), max_size=30)
texts = st.text(st.characters(codec="utf-8"), max_size=30)


class Pieces:
    """A tokenizer whose tokens are given texts."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = pieces

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.pieces[token] for token in ids)


def stream(detokenizer: Detokenizer, tokens: Sequence[int]) -> tuple[list[str], bool]:
    """The text after each token and after the end, and whether a stop string ended it."""
    shown, stopped = [""], False
    for token in tokens:
        stopped = detokenizer.push(token)
        shown.append(detokenizer.text)
        if stopped:
            break
    detokenizer.finish()
    shown.append(detokenizer.text)
    for before, after in itertools.pairwise(shown):
        assert after.startswith(before), "text was taken back"
    return shown, stopped


def over_pieces(pieces: Sequence[str], stop: Sequence[str]) -> tuple[str, bool]:
    shown, stopped = stream(Detokenizer(Pieces(pieces), [], stop), range(len(pieces)))  # type: ignore[arg-type]
    return shown[-1], stopped


@settings(deadline=None, max_examples=200)
@given(tokens=token_lists, prompt=texts)
def test_pieces_of_any_tokens_add_up_to_their_text(tokenizer: Tokenizer, tokens: list[int], prompt: str) -> None:
    shown, stopped = stream(Detokenizer(tokenizer, tokenizer.encode(prompt), ()), tokens)
    assert shown[-1] == tokenizer.decode(tokens)
    assert not stopped


@settings(deadline=None, max_examples=200)
@given(text=texts, prompt=texts)
def test_a_character_is_never_split(tokenizer: Tokenizer, text: str, prompt: str) -> None:
    text = text.replace("\ufffd", "")
    tokens = [token for byte in text for token in tokenizer.encode(byte)]  # one character at a time: many tokens
    shown, _ = stream(Detokenizer(tokenizer, tokenizer.encode(prompt), ()), tokens)
    assert shown[-1] == text
    assert not any("\ufffd" in out for out in shown)


def test_text_comes_as_soon_as_it_is_whole(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("🙂a")
    assert len(tokens) > 2
    detokenizer, shown = Detokenizer(tokenizer, [], ()), list[str]()
    for token in tokens:
        detokenizer.push(token)
        shown.append(detokenizer.text)
    assert shown[-2:] == ["🙂", "🙂a"]
    assert set(shown[:-2]) == {""}


def test_a_token_costs_the_same_however_long_the_text() -> None:
    class Counting(Pieces):
        most = 0

        def decode(self, ids: Sequence[int]) -> str:
            self.most = max(self.most, len(ids))
            return super().decode(ids)

    counting = Counting(["a", "b"])
    shown, _ = stream(Detokenizer(counting, [0] * 1000, ["zz"]), [0, 1] * 200)  # type: ignore[arg-type]
    assert shown[-1] == "ab" * 200
    assert counting.most < 16


def test_half_a_character_at_the_end_is_shown_as_such(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("🙂")[:-1]
    shown, _ = stream(Detokenizer(tokenizer, [], ()), tokens)
    assert shown[-2] == ""
    assert shown[-1] == tokenizer.decode(tokens)
    assert "\ufffd" in shown[-1]


@settings(deadline=None, max_examples=300)
@given(
    pieces=st.lists(st.text("abc", min_size=0, max_size=4), max_size=12),
    stop=st.lists(st.text("abc", min_size=1, max_size=5), max_size=3),
)
def test_stop_strings_in_any_pieces(pieces: list[str], stop: list[str]) -> None:
    whole = "".join(pieces)
    text, stopped = over_pieces(pieces, stop)
    assert stopped == any(s in whole for s in stop)
    assert not any(s in text for s in stop)
    if stopped:
        assert any(whole.startswith(text + s) for s in stop)
    else:
        assert text == whole


@pytest.mark.parametrize(
    ("pieces", "stop", "text"),
    [
        (["x", "a", "b", "y"], ["ab"], "x"),
        (["xa", "by"], ["ab"], "x"),
        (["ab"], ["ab"], ""),
        (["a", "a", "b"], ["ab"], "a"),
        (["ababa", "bc"], ["abc"], "abab"),
        (["x", "ab", "cd", "e"], ["abcde", "zz"], "x"),
        (["x", "y"], ["z", "y"], "x"),
        (["x\n", "\ny"], ["\n\n"], "x"),
        (["日", "本語"], ["本"], "日"),
    ],
)
def test_text_ends_before_the_stop_string(pieces: list[str], stop: list[str], text: str) -> None:
    assert over_pieces(pieces, stop) == (text, True)


@pytest.mark.parametrize("stop", [["cd", "bc"], ["bc", "cd"]])
def test_text_ends_before_the_first_of_two_overlapping_stop_strings(stop: list[str]) -> None:
    assert over_pieces(["a", "b", "c", "d"], stop) == ("a", True)
    assert over_pieces(["abcd"], stop) == ("a", True)


def test_what_may_become_a_stop_string_is_held_back() -> None:
    detokenizer = Detokenizer(Pieces(["xa", "b", "z", "ab"]), [], ["abc"])  # type: ignore[arg-type]
    shown = []
    for token in range(4):
        assert not detokenizer.push(token)
        shown.append(detokenizer.text)
    assert shown == ["x", "x", "xabz", "xabz"]
    detokenizer.finish()
    assert detokenizer.text == "xabzab"


def test_a_stop_string_of_the_prompt_does_not_stop(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("def stop")
    shown, stopped = stream(Detokenizer(tokenizer, prompt, ["stop", "p("]), tokenizer.encode("(x)"))
    assert (shown[-1], stopped) == ("(x)", False)


def test_special_tokens_are_no_text(tokenizer: Tokenizer) -> None:
    shown, _ = stream(Detokenizer(tokenizer, [], ()), [*tokenizer.encode("a"), 0])
    assert shown[-1] == "a"


@settings(deadline=None)
@given(text=texts)
def test_encode_and_decode_are_inverse(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ids_are_taken_as_they_are(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode([5, 0, 4095]) == [5, 0, 4095]
    assert tokenizer.encode(()) == []
    assert tokenizer.vocab_size == 4096


@pytest.mark.parametrize(
    "prompt", [[1, "a"], [True], [1.0], ["a"], [{"role": "user"}, 1], [{"content": "x"}], [None], None, 5, 1.5]
)
def test_what_is_no_prompt_is_refused(tokenizer: Tokenizer, prompt: object) -> None:
    with pytest.raises(PromptError):
        tokenizer.encode(prompt)  # type: ignore[arg-type]


def test_broken_unicode_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(PromptError, match="Unicode"):
        tokenizer.encode("a\ud800")


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


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no system message') }}",
        "{{ messages[0].content.__class__.__mro__ }}",
        "{{ missing.field }}",
        "{% if %}",
        "{{ messages[0].content + '!' }}",
    ],
)
def test_a_template_that_refuses_is_the_prompts_error(pair: Path, tmp_path: Path, template: str) -> None:
    chat = with_template(pair, tmp_path, template)
    with pytest.raises(PromptError) as caught:
        chat.encode([{"role": "system", "content": None}])
    assert "\n" not in str(caught.value)


def test_messages_without_a_template_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(PromptError, match="chat template"):
        tokenizer.encode([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", "not json"])
def test_a_broken_tokenizer_is_the_bundles_error(tmp_path: Path, content: str) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(content)
    with pytest.raises(BundleError) as caught:
        Tokenizer(file, None, {})
    assert "\n" not in str(caught.value)


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
