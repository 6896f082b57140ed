"""Files and folders of text become tokens, and what is no text is left out or refused by name."""

import json

import pytest

from specbuild.builder.distill import texts
from specbuild.builder.frontend import checkpoint as checkpoints
from specbuild.runtime.errors import OptionError


def test_texts_are_of_files_and_folders(target, tmp_path, caplog):
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.md").write_text("alpha", encoding="utf-8")
    (folder / "deep" / "b.jsonl").write_text(json.dumps({"text": "beta"}) + "\n" + json.dumps({"prompt": "gamma"}))
    (folder / ".hidden").write_text("no")
    (folder / "c.bin").write_bytes(b"\xff\xfe\xfd")
    found = checkpoints.find(str(target))
    ids = texts.read([folder], found)
    assert [found.tokenizer.decode(each[:-1]) for each in ids] == ["alpha", "beta", "gamma"]
    assert all(each[-1] == 0 for each in ids)
    assert caplog.messages == [f"1 of 3 files in {folder} are not UTF-8 and left out, like c.bin"]


def write(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.txt").write_text(content, encoding="utf-8")
    return [folder / f"{name}.txt" for name in files]


def test_each_text_ends_once(target, tmp_path):
    """One that says itself that it ends is not ended again; one of white space is none."""
    found = checkpoints.find(str(target))
    paths = write(tmp_path, plain="alpha", ended="alpha<|endoftext|>", blank=" \n", again="beta")
    plain, ended, again = texts.read(paths, found)
    assert plain == ended
    assert plain.count(0) == again.count(0) == 1
    assert texts.read([], found) == []


@pytest.mark.parametrize("name", ["none", "blank.txt", "bytes.bin", "bad.jsonl", ".hidden/x"])
def test_what_is_no_text_is_refused_by_name(target, tmp_path, name):
    write(tmp_path, blank=" \n")
    (tmp_path / "bytes.bin").write_bytes(b"ab\xff")
    (tmp_path / "bad.jsonl").write_text('{"text": "beta"}\n{"other": 1}\n')
    with pytest.raises(OptionError, match=f"^{tmp_path / name}") as caught:
        texts.read([tmp_path / name], checkpoints.find(str(target)))
    assert "\n" not in str(caught.value)
