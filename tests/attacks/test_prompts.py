"""Hostile prompts: however long, deep or odd, each is refused in one line, soon, and without a copy of it."""

from __future__ import annotations

import enum
import json
import os
import pty
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers

from specbuild.runtime.errors import BundleError, InputError, PromptError
from specbuild.runtime.requests import tokenizer as module
from specbuild.runtime.requests.chat import Chat, ChatTemplate
from specbuild.runtime.requests.prompt_file import MAX_LINE, read
from specbuild.runtime.requests.tokenizer import Tokenizer

USER = {"role": "user", "content": "hi"}
HUGE = 10**5000  # of more digits than Python prints
LIMIT = 512
FEW = 16 * 2**20  # bytes


class Raising(Mapping[str, Any]):
    """A mapping that cannot be read."""

    def __getitem__(self, key: object = None) -> Any:
        raise RuntimeError("no\nitem")

    __iter__ = __len__ = __getitem__  # type: ignore[assignment]


class Endless(Mapping[str, Any]):
    """A mapping without an end."""

    def __getitem__(self, key: str) -> Any:
        return key

    def __iter__(self) -> Iterator[str]:
        return map(str, count())

    def __len__(self) -> int:
        return 1


class Lying(str):
    """A text that says it is another."""

    __slots__ = ()

    def __str__(self) -> str:
        return "lie"


class Role(str, enum.Enum):
    USER = "user"


def in_itself() -> list[Any]:
    items: list[Any] = []
    items.append(items)
    return items


@pytest.fixture(scope="module")
def chatting(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}", encoding="utf-8")
    return Tokenizer(pair / "target" / "tokenizer.json", template, {})


def refusal(call: Any, *given: Any, **named: Any) -> str:
    with pytest.raises(InputError) as caught:
        call(*given, **named)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    return str(caught.value)


@pytest.mark.parametrize(
    "text", ["import os\n" * 10**6, "import os\n" * 10**7, " " * 10**6, "é" * 10**6, "e\u0301" * 10**5]
)
def test_a_long_prompt_is_refused_before_it_is_tokenized(chatting: Tokenizer, text: str) -> None:
    read_of_it: list[int] = []
    inner = chatting._encoding
    chatting._encoding = lambda piece, **options: read_of_it.append(len(piece)) or inner(piece, **options)  # type: ignore
    try:
        said = refusal(chatting.encode, text, LIMIT)
    finally:
        del chatting._encoding
    assert f"{len(text)} characters, this model takes {LIMIT}" in said
    assert sum(read_of_it) <= 10 * module._PIECE
    assert max(read_of_it, default=0) <= module._PIECE


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
def test_a_large_prompt_is_refused_in_a_few_megabytes(chatting: Tokenizer, make: Any) -> None:
    prompt = make()
    tracemalloc.start()
    try:
        refusal(chatting.encode, prompt, LIMIT)
        assert tracemalloc.get_traced_memory()[1] < 2 * FEW
    finally:
        tracemalloc.stop()


def words() -> tokenizers.Tokenizer:
    """One that lowers, strips, deletes spaces and has one token for an unknown word, after `<s>`."""
    made = tokenizers.Tokenizer(models.WordPiece({"<s>": 0, "a": 1, "##a": 2, "[UNK]": 3, "é": 4}, unk_token="[UNK]"))
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()])
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["<s>"])
    made.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    return made


def metaspace() -> tokenizers.Tokenizer:
    pieces = {"<unk>": 0, "▁": 1, "a": 2, "aa": 3, "▁a": 4} | {f"<0x{byte:02X}>": byte + 5 for byte in range(256)}
    made = tokenizers.Tokenizer(
        models.BPE(pieces, [("a", "a"), ("▁", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return made


@pytest.fixture(scope="module", params=["byte level", "words", "metaspace"])
def whole(request: pytest.FixtureRequest, pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = pair / "target" / "tokenizer.json"
    if request.param != "byte level":
        path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
        (words() if request.param == "words" else metaspace()).save(str(path))
    return Tokenizer(path, None, {})


@pytest.mark.slow(but=("words",))
@settings(deadline=None, max_examples=150)
@given(
    unit=st.text(st.sampled_from("aA é\n\u0301日🙂<s>|"), min_size=1, max_size=12),
    times=st.integers(1, 2000),
    tail=st.text(st.characters(codec="utf-8"), max_size=40),
    limit=st.integers(2, 600),
)
def test_what_fits_has_the_ids_of_the_whole_text(
    whole: Tokenizer, unit: str, times: int, tail: str, limit: int
) -> None:
    text = (unit * times)[:6000] + tail
    wanted = whole._tokenizer.encode(text).ids
    piece = module._PIECE
    module._PIECE = 1024  # pieces of a text that is not as long
    try:
        got = whole.encode(text, limit)
    except PromptError:
        assert len(wanted) >= limit
    else:
        assert got == wanted
    finally:
        module._PIECE = piece


CUTS = {"max_length": 3, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
FILLS = {"strategy": {"Fixed": 999}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0}


@pytest.mark.parametrize("how", [{"truncation": CUTS}, {"padding": FILLS | {"pad_token": "x"}}])
def test_a_tokenizer_that_cuts_or_fills_does_neither(pair: Path, tmp_path: Path, how: dict[str, Any]) -> None:
    spec = json.loads((pair / "target" / "tokenizer.json").read_text(encoding="utf-8"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec | how), encoding="utf-8")
    sound, other = (Tokenizer(folder / "tokenizer.json", None, {}) for folder in (pair / "target", tmp_path))
    assert other.encode("def main(argv):") == sound.encode("def main(argv):")


@pytest.mark.parametrize(
    "prompt",
    [
        *(b"x" * 10**6, {1}, np.array([1]), [np.int64(1)], [True], [1.0], (x for x in "a"), in_itself(), object()),
        *([float("nan")], [HUGE, "a"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_prompt_is_told_by_its_kind(chatting: Tokenizer, prompt: Any) -> None:
    assert refusal(chatting.encode, prompt, LIMIT).startswith("a prompt is a text, a list of token ids")


WRONG: list[Any] = [
    *(USER | {"x": x} for x in ({1}, b"a", (i for i in "a"), float("nan"), float("inf"), HUGE, np.int64(1), {1: 2})),
    *(USER | {"x": in_itself()}, USER | {"x": Raising()}, Raising(), Endless(), {"content": "x"}),
    *({"role": role, "content": "x"} for role in (None, 1)),
    *(USER | {"content": [part]} for part in ({"type": "image_url", "image_url": {"url": "x"}}, "x", {"type": "text"})),
    *(USER | {"content": [{"type": "text", "text": 1}]}, USER | {"content": "\ud800"}),
]


@pytest.mark.parametrize("message", WRONG)
def test_a_message_that_is_none_is_refused(chatting: Tokenizer, message: Any) -> None:
    refusal(lambda: chatting.encode(Chat([message]), LIMIT))


def test_odd_texts_are_texts(chatting: Tokenizer) -> None:
    for text in ("\0", "a" + "\u0301" * 10**4, "\u202eabc\u200b", "<|endoftext|>"):
        assert chatting.encode([{"role": "user", "content": text}]) == chatting.encode(text)
    assert chatting.chat_text(Chat([{"role": Role.USER, "content": Lying("truth")}])) == "truth"
    assert chatting.encode("<|endoftext|>") == [0]  # as in transformers, a special token's text is that token


def test_content_parts_are_joined_or_read_by_the_template() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = Chat([USER | {"content": parts}])
    assert ChatTemplate("{{ messages[0].content + '!' }}", {}).render(chat) == "ab!"
    for over in ("messages[0].content", "messages[0]['content']", "content"):
        source = "{% set content = messages[0].content %}{% for p in " + over + " %}{{ p.text }};{% endfor %}"
        assert ChatTemplate(source, {}).render(chat) == "a;b;"


@pytest.mark.parametrize("source", ["{{ messages[0].content }}", "{% set tools = [] %}{{ tools }}"])
def test_tools_that_a_template_does_not_read_are_refused(source: str) -> None:
    said = refusal(ChatTemplate(source, {}).render, Chat([USER], [{"name": "f"}]))
    assert said.startswith("the model's chat template does not read tools: give one that does")
    assert ChatTemplate(source, {}).render(Chat([USER], []))
    assert ChatTemplate("{% if tools %}{{ tools[0].name }}{% endif %}", {}).render(Chat([USER], [{"name": "f"}])) == "f"


def test_a_file_without_an_end_is_refused() -> None:
    assert refusal(read, "/dev/zero", {}).startswith(f"/dev/zero:1: longer than {MAX_LINE} bytes")


READ = "from specbuild.runtime.requests.prompt_file import read; read('-', {})"


@pytest.mark.parametrize("stdin", ["closed", "empty", "terminal"])
def test_no_input_is_said_in_one_line(stdin: str) -> None:
    """By the reader itself: a terminal would be waited for, a closed input is None."""
    command, ends = [sys.executable, "-c", READ], pty.openpty()
    if stdin == "closed":
        command = ["sh", "-c", 'exec "$@" <&-', "sh", *command]
    try:
        given = ends[1] if stdin == "terminal" else subprocess.DEVNULL
        done = subprocess.run(command, stdin=given, capture_output=True, text=True, timeout=30)
    finally:
        for end in ends:
            os.close(end)
    last = done.stderr.strip().splitlines()[-1]
    wanted = {"closed": "input is closed", "empty": "- has no prompts", "terminal": "input is a terminal"}
    assert last.startswith("specbuild.runtime.errors.PromptError: ")
    assert wanted[stdin] in last


def test_a_template_that_is_not_utf8_is_the_bundles_error(pair: Path, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_bytes(b"\xff\xfe{{ x }}")
    with pytest.raises(BundleError, match=r"^the chat template is not a text of UTF-8: ") as caught:
        Tokenizer(pair / "target" / "tokenizer.json", tmp_path / "chat.jinja", {})
    assert "\n" not in str(caught.value)
