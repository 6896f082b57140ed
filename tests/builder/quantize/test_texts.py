"""Texts to calibrate with and to judge by: every kind of line, every damage, and that no text is both."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.builder.quantize import texts
from specbuild.builder.quantize.texts import HELD_OUT, LENGTH, read
from specbuild.runtime.errors import OptionError


class Bytes:
    """A tokenizer whose tokens are a text's characters, with a template for chats."""

    def __call__(self, texts: list[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(each) for each in text] for text in texts]}

    def apply_chat_template(self, messages: Any, tokenize: bool) -> Any:
        assert not tokenize
        if isinstance(messages[0], list):
            return ["a batch of texts"]
        return "".join(f"<{each['role']}>{each['content']}" for each in messages)


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def words(found: texts.Texts) -> list[str]:
    return sorted("".join(map(chr, each)) for each in found.calibration + found.held_out)


def test_every_kind_of_line(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "texts.jsonl",
        {"text": "a text of its own", "id": 7},
        {"prompt": "a prompt, and what came of it", "category": None},
        {"turns": ["the first turn", "the second turn"]},
        {"messages": [{"role": "user", "content": "what is it?"}, {"role": "assistant", "content": "it is"}]},
    )
    path.write_text("\n" + path.read_text(encoding="utf-8").replace("\n", "\r\n\r\n"), encoding="utf-8")
    found = read(path, Bytes(), 256, 32, 0)
    chat = "<user>what is it?<assistant>it is"
    assert words(found) == [chat, "a prompt, and what came of it", "a text of its own", "the first turn",
                            "the second turn"]  # fmt: skip
    assert found.source == str(path)


def test_long_texts_are_cut_and_short_pieces_dropped(tmp_path: Path) -> None:
    path = lines(tmp_path / "t", {"text": "".join(map(chr, range(1000, 1000 + 2 * LENGTH + 7)))}, {"text": "short"})
    found = read(path, Bytes(), 4096, 32, 0)
    assert sorted(map(len, found.calibration + found.held_out)) == [LENGTH, LENGTH]
    assert sorted(t for each in found.calibration + found.held_out for t in each) == list(
        range(1000, 1000 + 2 * LENGTH)
    )
    cut = read(path, Bytes(), 20, 4096, 0)
    assert {len(each) for each in cut.calibration + cut.held_out} == {20, 2 * LENGTH + 7 - 20 * (519 // 20)}


def test_seeds_choose_other_texts(tmp_path: Path) -> None:
    path = lines(tmp_path / "t", *({"text": f"text number {number:3}"} for number in range(100)))
    first, same, other = (read(path, Bytes(), 64, 8, seed) for seed in (0, 0, 1))
    assert first == same
    assert len(first.calibration + first.held_out) == 8
    assert words(first) != words(other)
    assert first.sha256 != other.sha256
    assert read(path, Bytes(), 64, 9, 0).sha256 != first.sha256


def test_the_hash_is_the_texts_and_not_their_files(tmp_path: Path) -> None:
    rows = [{"text": f"text number {number}"} for number in range(9)]
    one, two = (read(lines(tmp_path / name, *rows), Bytes(), 64, 32, 0) for name in "ab")
    assert one.sha256 == two.sha256
    changed = read(lines(tmp_path / "a", *rows[:-1], {"text": "another text"}), Bytes(), 64, 32, 0)
    assert changed.sha256 != one.sha256


@settings(deadline=None, derandomize=True)
@given(st.lists(st.text(alphabet="ab", min_size=8, max_size=12), min_size=1, max_size=30), st.integers(2, 20))
def test_no_text_is_both_calibrated_with_and_judged_by(
    tmp_path_factory: pytest.TempPathFactory, each: Sequence[str], size: int
) -> None:
    path = lines(tmp_path_factory.mktemp("texts") / "t", *({"text": text} for text in each))
    found = read(path, Bytes(), 64, size, 0)
    kept, held_out = ({tuple(text) for text in part} for part in (found.calibration, found.held_out))
    assert kept
    assert held_out
    if len(set(each)) > 1:
        assert not kept & held_out
        assert len(found.held_out) == -(-min(size, len(set(each))) // HELD_OUT)


def test_one_short_text_is_halved(tmp_path: Path) -> None:
    found = read(lines(tmp_path / "t", {"text": "abcdefgh"}), Bytes(), 64, 32, 0)
    assert words(found) == ["abcd", "efgh"]
    assert (len(found.calibration), len(found.held_out)) == (1, 1)


def test_one_token_is_not_halved(tmp_path: Path) -> None:
    found = read(lines(tmp_path / "t", {"text": "aaaaaaaa"}), Bytes(), 1, 32, 0)
    assert words(found) == ["a", "a"]


def test_models_of_few_positions_get_shorter_texts(tmp_path: Path) -> None:
    found = read(lines(tmp_path / "t", {"text": "abcdefgh"}), Bytes(), 4, 32, 0)
    assert words(found) == ["abcd", "efgh"]


def test_without_a_file_it_is_ours() -> None:
    found = read(None, Bytes(), 4096, 16, 0)
    assert found.source == "ours"
    assert len(found.calibration + found.held_out) == 16
    assert all(len(each) <= LENGTH for each in found.calibration)
    told = found.to_dict()
    assert told["tokens"] == {
        "calibration": sum(map(len, found.calibration)),
        "held_out": sum(map(len, found.held_out)),
    }
    assert (told["source"], told["sha256"]) == (found.source, found.sha256)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a text of its own"}\n\n{"text": ', ":3: Input data was truncated"),
        ("[1, 2]", ':1: give a JSON object, like {"text": "…"}'),
        ("3", ":1: give a JSON object"),
        ('{"id": 3}', ':1: give one of "text", "prompt", "turns" or "messages"'),
        ('{"text": "a", "prompt": "b"}', ':1: give one of "text", "prompt", "turns" or "messages"'),
        ('{"text": 3}', ':1: "text" is not text'),
        ('{"prompt": null}', ':1: "prompt" is not text'),
        ('{"text": ["a text of its own"]}', ':1: "text" is not text'),
        ('{"turns": "a text of its own"}', ':1: "turns" is not text'),
        ('{"turns": ["one", 2]}', ':1: "turns" is not text'),
        ('{"messages": [{"role": "user"}]}', ":1: its messages cannot be rendered: KeyError 'content'"),
        ('{"messages": 3}', ":1: its messages cannot be rendered"),
        ('{"messages": [[{"role": "user", "content": "…"}]]}', ":1: its messages are not those of one chat"),
        ("[" * 100000, ":1: "),
        ("", ' has no text of 8 tokens or more: give lines like {"text": "…"}'),
        ('{"text": "short"}\n{"turns": []}\n{"text": ""}', " has no text of 8 tokens or more"),
    ],
)
def test_what_is_no_text(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(OptionError, match=re.escape(f"{path}{message}")) as caught:
        read(path, Bytes(), 256, 32, 0)
    assert "\n" not in str(caught.value)


def test_a_template_that_says_much_is_told_in_one_line(tmp_path: Path) -> None:
    class Verbose(Bytes):
        def apply_chat_template(self, messages: Any, tokenize: bool) -> Any:
            raise RuntimeError("the template\nis wrong\n")

    path = lines(tmp_path / "t", {"messages": []})
    with pytest.raises(OptionError, match=":1: its messages cannot be rendered: the template") as caught:
        read(path, Verbose(), 256, 32, 0)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"none cannot be read \(No such file or directory\): give a file of JSON"):
        read(tmp_path / "none", Bytes(), 256, 32, 0)
    with pytest.raises(OptionError, match="cannot be read"):
        read(tmp_path, Bytes(), 256, 32, 0)
    (tmp_path / "latin").write_bytes('{"text": "Zwölf Boxkämpfer"}'.encode("latin-1"))
    with pytest.raises(OptionError, match=r"latin is not UTF-8 .*: give a file of JSON lines"):
        read(tmp_path / "latin", Bytes(), 256, 32, 0)
