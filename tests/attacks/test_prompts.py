"""Hostile prompts: however long, deep or odd, each is refused in one line, soon, and without a copy of it."""

import enum
import json
import os
import pty
import subprocess
import sys
import tracemalloc
from collections.abc import Mapping
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_tokenizers import KINDS
from tokenizers import normalizers

from specbuild.runtime.errors import BundleError, InputError, PromptError
from specbuild.runtime.requests.chat import Chat
from specbuild.runtime.requests.prompt_file import MAX_LINE, read
from specbuild.runtime.requests.tokenizer import Tokenizer

USER = {"role": "user", "content": "hi"}
HUGE = 10**5000  # of more digits than Python prints
LIMIT = 512
FEW = 16 * 2**20  # bytes


class Raising(Mapping[str, Any]):
    """A mapping that cannot be read."""

    def __getitem__(self, key=None):
        raise RuntimeError("no\nitem")

    __iter__ = __len__ = __getitem__


class Endless(Mapping[str, Any]):
    """A mapping without an end."""

    def __getitem__(self, key):
        return key

    def __iter__(self):
        return map(str, count())

    def __len__(self):
        return 1


class Lying(str):
    """A text that says it is another."""

    __slots__ = ()

    def __str__(self):
        return "lie"


class Role(str, enum.Enum):
    USER = "user"


def in_itself():
    items = []
    items.append(items)
    return items


@pytest.fixture(scope="module")
def chatting(pair, tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}", encoding="utf-8")
    return Tokenizer(pair / "target" / "tokenizer.json", template, {})


def refusal(call, *given, **named):
    with pytest.raises(InputError) as caught:
        call(*given, **named)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    return str(caught.value)


@pytest.mark.parametrize(
    "text", ["import os\n" * 10**6, "import os\n" * 10**7, " " * 10**6, "é" * 10**6, "e\u0301" * 10**5]
)
def test_a_long_prompt_is_refused_before_it_is_tokenized(chatting, text):
    assert f"{len(text)} characters, this model takes {LIMIT}" in refusal(chatting.encode, text, LIMIT)


@pytest.mark.slow(but=("ids",))
@pytest.mark.parametrize(
    "make",
    [
        lambda: [5] * 10**7,
        lambda: [USER] * 10**6,
        lambda: [{"role": "user", "content": "x" * 10**8}],
        lambda: [USER | {"content": [{"type": "text", "text": "a"}] * 10**6}],
    ],
    ids=["ids", "messages", "a message", "parts"],
)
def test_a_large_prompt_is_refused_in_a_few_megabytes(chatting, make):
    prompt = make()
    tracemalloc.start()
    try:
        refusal(chatting.encode, prompt, LIMIT)
        assert tracemalloc.get_traced_memory()[1] < 2 * FEW
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module", params=["byte_level", "word_piece", "prefix_space"])
def whole(request):
    """A tokenizer of a kind; that of words lowers and deletes spaces."""
    made = KINDS[request.param]()
    if request.param == "word_piece":
        made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()])
    return Tokenizer(made.to_str().encode(), None, {})


@pytest.mark.slow
@settings(max_examples=60)
@given(
    unit=st.text(st.sampled_from("aA \u00e9\n\u0301猫🎉<|x>"), min_size=1, max_size=12),
    times=st.integers(1, 20_000),
    tail=st.text(st.characters(codec="utf-8"), max_size=40),
    limit=st.integers(2, 20_000),
)
def test_what_fits_has_the_ids_of_the_whole_text(whole, unit, times, tail, limit):
    text = (unit * times)[:40_000] + tail
    wanted = whole.encode(text)
    try:
        assert whole.encode(text, limit) == wanted
    except PromptError:
        assert len(wanted) >= limit


CUTS = {"max_length": 3, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
FILLS = {"strategy": {"Fixed": 999}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0}


@pytest.mark.parametrize("how", [{"truncation": CUTS}, {"padding": FILLS | {"pad_token": "x"}}])
def test_a_tokenizer_that_cuts_or_fills_does_neither(pair, tmp_path, how):
    spec = json.loads((pair / "target" / "tokenizer.json").read_text(encoding="utf-8"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec | how), encoding="utf-8")
    sound, other = (Tokenizer(folder / "tokenizer.json", None, {}) for folder in (pair / "target", tmp_path))
    assert other.encode("def main(argv):") == sound.encode("def main(argv):")


WRONG = [
    *(USER | {"x": x} for x in ({1}, b"a", (i for i in "a"), float("nan"), float("inf"), HUGE, np.int64(1), {1: 2})),
    *(USER | {"x": in_itself()}, USER | {"x": Raising()}, Raising(), Endless(), {"content": "x"}),
    *({"role": role, "content": "x"} for role in (None, 1)),
    *(USER | {"content": [part]} for part in ({"type": "image_url", "image_url": {"url": "x"}}, "x", {"type": "text"})),
    *(USER | {"content": [{"type": "text", "text": 1}]}, USER | {"content": "\ud800"}),
]


@pytest.mark.parametrize("message", WRONG)
def test_a_message_that_is_none_is_refused(chatting, message):
    refusal(lambda: chatting.encode(Chat([message]), LIMIT))


def test_odd_texts_are_texts(chatting):
    for text in ("\0", "a" + "\u0301" * 10**4, "\u202eabc\u200b", "<|endoftext|>"):
        assert chatting.encode([{"role": "user", "content": text}]) == chatting.encode(text)
    assert chatting.chat_text(Chat([{"role": Role.USER, "content": Lying("truth")}])) == "truth"
    assert chatting.encode("<|endoftext|>") == [0]  # as in transformers, a special token's text is that token


def test_a_file_without_an_end_is_refused():
    assert refusal(read, "/dev/zero", {}).startswith(f"/dev/zero:1: longer than {MAX_LINE} bytes")


def test_a_template_that_is_not_utf8_is_the_bundles_error(pair, tmp_path):
    (tmp_path / "chat.jinja").write_bytes(b"\xff\xfe{{ x }}")
    with pytest.raises(BundleError, match=r"^the chat template is not a text of UTF-8: ") as caught:
        Tokenizer(pair / "target" / "tokenizer.json", tmp_path / "chat.jinja", {})
    assert "\n" not in str(caught.value)


def test_a_terminal_is_not_waited_for():
    ends = pty.openpty()
    code = "from specbuild.runtime.requests.prompt_file import read; read('-', {})"
    done = subprocess.run([sys.executable, "-c", code], stdin=ends[1], capture_output=True, text=True, timeout=30)
    for end in ends:
        os.close(end)
    assert "PromptError: " in done.stderr
    assert "input is a terminal" in done.stderr
