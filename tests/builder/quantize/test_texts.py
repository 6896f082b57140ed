"""Texts to calibrate with and to judge by: every kind of line, every damage, and that no text is both."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.builder.quantize.texts import read
from specbuild.runtime.errors import OptionError


class Bytes:
    """A tokenizer whose tokens are a text's characters, with a template for chats."""

    def __call__(self, texts):
        return {"input_ids": [[ord(each) for each in text] for text in texts]}

    def apply_chat_template(self, messages, tokenize):
        assert not tokenize
        if isinstance(messages[0], list):
            return ["a batch of texts"]
        return "".join(f"<{each['role']}>{each['content']}" for each in messages)


def write(path, *rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def words(found):
    return sorted("".join(map(chr, each)) for each in found.calibration + found.held_out)


def test_every_kind_of_line(tmp_path):
    texts = ["a text of its own", "a prompt, and what came of it", "the first turn", "the second turn"]
    chat = [{"role": "user", "content": "what is it?"}, {"role": "assistant", "content": "it is"}]
    rows = {"text": texts[0], "id": 7}, {"prompt": texts[1], "category": None}, {"turns": texts[2:]}
    path = write(tmp_path / "texts.jsonl", *rows, {"messages": chat})
    path.write_text("\n" + path.read_text(encoding="utf-8").replace("\n", "\r\n\r\n"), encoding="utf-8")
    found = read(path, Bytes(), 256, 32, 0)
    assert words(found) == sorted([*texts, "<user>what is it?<assistant>it is"])
    assert found.source == str(path)


def test_long_texts_are_cut_and_short_pieces_dropped(tmp_path):
    text = "".join(map(chr, range(1000, 1000 + 2 * 256 + 7)))
    path = write(tmp_path / "t", {"text": text}, {"text": "short"})
    assert words(read(path, Bytes(), 4096, 32, 0)) == [text[:256], text[256:512]]
    cut = words(read(path, Bytes(), 20, 4096, 0))
    assert (max(map(len, cut)), "".join(cut)) == (20, text)


def test_seeds_choose_other_texts(tmp_path):
    rows = [{"text": f"text number {number:3}"} for number in range(100)]
    path, copy = (write(tmp_path / name, *rows) for name in "ab")
    first, other = (read(path, Bytes(), 64, 8, seed) for seed in (0, 1))
    assert len(words(first)) == 8
    assert words(first) != words(other)
    assert read(copy, Bytes(), 64, 8, 0).sha256 == first.sha256, "the hash is of the texts, not of their file"
    assert len({first.sha256, other.sha256, read(path, Bytes(), 64, 9, 0).sha256}) == 3


@settings(deadline=None, derandomize=True)
@given(st.lists(st.text(alphabet="ab", min_size=8, max_size=12), min_size=1, max_size=30), st.integers(2, 20))
def test_no_text_is_both_calibrated_with_and_judged_by(tmp_path_factory, each, size):
    path = write(tmp_path_factory.mktemp("texts") / "t", *({"text": text} for text in each))
    found = read(path, Bytes(), 64, size, 0)
    kept, held_out = ({tuple(text) for text in part} for part in (found.calibration, found.held_out))
    assert kept
    assert held_out
    assert len(set(each)) == 1 or not kept & held_out


@pytest.mark.parametrize(
    ("text", "length", "halves"),
    [("abcdefgh", 64, ["abcd", "efgh"]), ("aaaaaaaa", 1, ["a", "a"]), ("abcdefgh", 4, ["abcd", "efgh"])],
)
def test_the_only_text_is_halved(tmp_path, text, length, halves):
    found = read(write(tmp_path / "t", {"text": text}), Bytes(), length, 32, 0)
    assert words(found) == halves
    assert (len(found.calibration), len(found.held_out)) == (1, 1)


def test_without_a_file_it_is_ours():
    found = read(None, Bytes(), 4096, 16, 0)
    report = found.to_dict()
    assert report["source"] == "ours"
    assert sum(report["tokens"].values()) == sum(map(len, words(found)))


WRONG_LINES = st.one_of(
    st.dictionaries(
        st.sampled_from(["text", "prompt", "turns", "messages", "other"]),
        st.none() | st.integers() | st.dictionaries(st.text(), st.integers()) | st.lists(st.integers(), min_size=1),
        max_size=2,
    ),
    st.just({"turns": "a text of its own"}),
    st.just({"messages": [[{"role": "user", "content": "of several chats"}]]}),
    st.just({"messages": [{"role": "user"}]}),
    st.lists(st.integers()),
    st.integers(),
).map(json.dumps) | st.sampled_from(['{"text": ', '{"text": "a", "prompt": "b"}', "[" * 100000])


@settings(deadline=None, derandomize=True)
@given(WRONG_LINES)
def test_a_line_that_is_no_text_is_refused_by_its_number(tmp_path_factory, line):
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    path.write_text(f'{{"text": "a text of its own"}}\n\n{line}\n', encoding="utf-8")
    with pytest.raises(OptionError, match=f"^{path}:3: .*$"):
        read(path, Bytes(), 256, 32, 0)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read"),
        ('{"text": "Zwölf Boxkämpfer"}'.encode("latin-1"), "is not UTF-8 .*: give a file of JSON lines"),
        (b"", "has no text of 8 tokens or more: give lines like"),
        (b'{"text": "short"}\n{"turns": []}\n{"text": ""}', "has no text of 8 tokens or more: give lines like"),
    ],
)
def test_a_file_without_texts_is_refused(tmp_path, content, why):
    path = tmp_path / "texts.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(OptionError, match=f"^{path} {why}"):
        read(path, Bytes(), 256, 32, 0)
